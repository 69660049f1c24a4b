"""Boxes that are used by one test after another: to make and remove one takes most tests' time.

What is asked of a box that was used: its processes are killed and its files removed by a program
in it, which must succeed and find nothing left. One of which that cannot be said is removed, and so
is one that a test destroyed; the next test gets a new one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from capsule.errors import CapsuleError
from capsule.model import Template
from capsule.providers.contract import Box, Provider
from capsule.testing.harness import Launcher, NewProvider, Subject, opened, owned

WRITABLE = "/workspace /tmp /var/tmp /dev/shm"
# `kill -1` is everybody of this user but the shell itself; where nobody is left, it says so.
OURS = "-not -path '*/.capsule*'"  # the agent, where it has no other place
ALL = f"{WRITABLE} -mindepth 1 {OURS}"
TIDY = f"kill -9 -1 2>/dev/null; find {ALL} -delete && find {ALL}"
TIDY_WITHIN = 5.0


@pytest_asyncio.fixture(name="provider", loop_scope="session")
async def provider_of_ones_own(new_provider: NewProvider) -> AsyncIterator[Provider]:
    async with opened(new_provider()) as made:
        yield made


@pytest_asyncio.fixture(name="launch", loop_scope="session")
async def launch_of_ones_own(provider: Provider, template: Template) -> Launcher:
    return Launcher(provider, f"t{uuid.uuid4().hex[:10]}-", template)


@pytest.fixture(scope="session")
def shared_dirs() -> Iterator[ExitStack]:
    """For what the boxes on a shelf need, for as long as they stand there."""
    with ExitStack() as held:
        yield held


@dataclass(slots=True)
class Shelf:
    """Owns an open provider and at most one box that nobody uses."""

    provider: Provider
    template: Template
    prefix: str
    _box: Box | None = None
    _launch: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self._launch = Launcher(self.provider, self.prefix, self.template)

    async def take(self) -> Subject:
        box, self._box = self._box, None
        return await self._launch() if box is None else Subject(box)

    async def put_back(self, subject: Subject) -> None:
        if await _is_clean(subject):
            self._box = subject.box
        else:
            await subject.box.destroy()

    async def aclose(self) -> None:
        for handle in await owned(self.provider):
            await self.provider.discard(handle)
        await self.provider.aclose()


async def _is_clean(subject: Subject) -> bool:
    try:
        async with asyncio.timeout(TIDY_WITHIN):
            for info in await subject.link.execs():
                if info.running:
                    await subject.link.kill(info.id)
            exit, left, said, _ = await subject.sh(TIDY)
            alive = (await subject.link.usage()).processes
            return (exit.exit_code, left, said) == (0, b"", b"") and not alive
    except (CapsuleError, TimeoutError):
        return False


class Shelves:
    """One for each kind of box, made when it is asked for."""

    def __init__(self) -> None:
        self._all: dict[object, Shelf] = {}

    async def of(self, kind: object, make: Callable[[], Shelf]) -> Shelf:
        if kind not in self._all:
            shelf = make()
            await shelf.provider.open()
            self._all[kind] = shelf
        return self._all[kind]

    async def aclose(self) -> None:
        for shelf in self._all.values():
            await shelf.aclose()
