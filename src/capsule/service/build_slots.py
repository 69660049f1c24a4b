"""Builds under way: how many there may be, how long each may take, and what they leave behind.

One task, begun by `start` and ended by `aclose`, clears up after builds, also those of a server
that was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from capsule.config import Config
from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    ForbiddenError,
    UnavailableError,
)
from capsule.providers.images import Progress
from capsule.service.tasks import Tasks

log = structlog.get_logger(__name__)

TIDY_AGAIN = 20.0  # seconds


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to build one template, for a time."""

    name: str
    deadline: float  # by the loop's clock

    async def heard(self, words: AsyncGenerator[Progress, None]) -> AsyncGenerator[Progress, None]:
        while True:
            try:
                async with self.in_time():
                    said = await anext(words)
            except StopAsyncIteration:
                return
            yield said

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self.deadline):
                yield
        except TimeoutError:
            raise UnavailableError(
                f"the build of {self.name} took too long, and was cancelled",
                hint="make it quicker, or raise CAPSULE_BUILD_TIMEOUT",
            ) from None


class BuildSlots:
    def __init__(self, config: Config, tidy: Callable[[], Awaitable[None]]) -> None:
        """`tidy` removes what is left of builds that are over."""
        self._config = config
        self._tidy = tidy
        self._taken: set[str] = set()
        self._tasks = Tasks()
        self._started = False

    def start(self) -> None:
        self._started = True
        self._tidy_soon()

    async def aclose(self) -> None:
        self._started = False
        await self._tasks.aclose()

    @contextmanager
    def take(self, name: str) -> Iterator[Slot]:
        """Raises ConflictError (it is being built), ForbiddenError, CapacityError."""
        self._check(name)
        self._taken.add(name)
        try:
            yield Slot(name, asyncio.get_running_loop().time() + self._config.build_timeout)
        finally:
            self._taken.discard(name)
            self._tidy_soon()  # the Engine may have gone in the middle of it

    def _check(self, name: str) -> None:
        if name in self._taken:
            raise ConflictError(f"template {name} is being built", hint="wait for its end")
        most = self._config.max_builds
        if most == 0:
            raise ForbiddenError("this server builds no images", hint="see its setting max_builds")
        if len(self._taken) >= most:
            raise CapacityError(
                f"all builds are taken: {len(self._taken)}, limit {most}",
                retry_after=10.0,
                hint="wait for one to end",
                limit=most,
            )

    def _tidy_soon(self) -> None:
        if self._started and not self._tasks:
            self._tasks.spawn(self._tidy_all(), "tidy up after builds")

    async def _tidy_all(self) -> None:
        """Until nothing is left but builds under way; where nothing was, nobody is asked."""
        while await asyncio.to_thread(_any_left, self._config.data_dir):
            try:
                await self._tidy()
            except CapsuleError as error:
                log.warning("what a build left is still there", reason=error.message)
            await asyncio.sleep(TIDY_AGAIN)


def _any_left(data_dir: Path) -> bool:
    folder = data_dir / "builds"
    return folder.is_dir() and any(folder.iterdir())
