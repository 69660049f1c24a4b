"""A provider that is opened when somebody first asks for it.

A server has every provider there is at hand, but neither imports nor opens one that nobody names.
Once it has made a box, a mark in the data directory says so, and the next server looks for what it
left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from capsule.errors import UnavailableError
from capsule.host_errors import host_errors
from capsule.model import Handle, Isolation, SandboxId, SandboxSpec
from capsule.providers.contract import Box, Capabilities, Provider


class OnDemand(Provider):
    """`found` is what it can do, once that is known. What keeps it from being opened is raised by
    whatever was asked of it, and it is tried again the next time."""

    name: str  # type: ignore[misc]  # one class stands for all of them

    def __init__(
        self, name: str, make: Callable[[], Provider], *, least: Isolation, mark: Path
    ) -> None:
        self.name = name
        self.found: Capabilities | None = None
        self._make = make
        self._least = least
        self._mark = mark
        self._inner: Provider | None = None
        self._opening = asyncio.Lock()  # two first creates open it once

    async def open(self) -> None:
        """Does nothing yet."""

    async def aclose(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.aclose()

    async def probe(self) -> Capabilities:
        return await (await self._opened()).probe()

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        inner = await self._opened()
        with host_errors(f"provider {self.name} cannot be marked as used"):
            await asyncio.to_thread(self._note)
        return await inner.launch(sandbox_id, spec)

    async def adopt(self, handle: Handle) -> Box | None:
        return await (await self._opened()).adopt(handle)

    async def owned(self) -> AsyncIterator[Handle]:
        if self._inner is None and not await asyncio.to_thread(self._mark.exists):
            return  # it never made a box
        async for handle in (await self._opened()).owned():
            yield handle

    async def discard(self, handle: Handle) -> None:
        await (await self._opened()).discard(handle)

    async def _opened(self) -> Provider:
        if self._inner is None:
            async with self._opening:
                if self._inner is None:
                    self._inner = await self._open()
        return self._inner

    async def _open(self) -> Provider:
        made = await asyncio.to_thread(self._make)  # imports it
        try:
            await made.open()
            found = await made.probe()
            if found.isolation.weaker_than(self._least):
                raise UnavailableError(
                    f"provider {self.name} isolates by {found.isolation} here, "
                    f"required: {self._least}",
                    hint="see `capsule doctor`, or set a lower CAPSULE_MIN_ISOLATION",
                )
        except BaseException:
            await made.aclose()
            raise
        self.found = found
        return made

    def _note(self) -> None:
        if not self._mark.exists():
            self._mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._mark.touch(mode=0o600)
