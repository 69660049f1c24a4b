"""A provider that is opened when somebody first asks for it.

A server has every provider there is at hand, but neither imports nor opens one that nobody names.
Once it has made a box, a mark in the data directory says so, and the next server looks for what it
left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from capsule.errors import NotSupportedError, UnavailableError
from capsule.host_errors import host_errors
from capsule.model import Handle, Isolation, SandboxId, SandboxSpec
from capsule.providers.contract import (
    Box,
    Capabilities,
    FileChange,
    Layered,
    Mark,
    Merging,
    Portable,
    Provider,
    Saved,
    Volumed,
    VolumeLook,
)


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
        await self._mark_used()
        return await inner.launch(sandbox_id, spec)

    async def adopt(self, handle: Handle) -> Box | None:
        return await (await self._opened()).adopt(handle)

    async def owned(self) -> AsyncIterator[Handle]:
        if not await self._was_used():
            return
        async for handle in (await self._opened()).owned():
            yield handle

    async def discard(self, handle: Handle) -> None:
        await (await self._opened()).discard(handle)

    @property
    def max_layers(self) -> int:
        return self._inner.max_layers if isinstance(self._inner, Layered) else 1

    async def save(
        self, box: Box, layer: str, *, full: bool, most_bytes: int, since: Mark | None = None
    ) -> Saved:
        keeper = await self._layered()
        return await keeper.save(box, layer, full=full, most_bytes=most_bytes, since=since)

    async def merge(self, layer: str, stack: Sequence[str], *, count: int) -> Saved:
        inner: object = await self._opened()
        if not isinstance(inner, Merging):
            raise self._cannot("merge layers")
        return await inner.merge(layer, stack, count=count)

    async def diff(
        self, old: Sequence[str], new: Sequence[str], *, most: int
    ) -> Sequence[FileChange]:
        return await (await self._layered()).diff(old, new, most=most)

    async def read_layers(
        self, layers: Sequence[str], *, most_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        inner = await self._portable()
        async with aclosing(inner.read_layers(layers, most_bytes=most_bytes)) as pieces:
            async for piece in pieces:
                yield piece

    async def write_layer(
        self, layer: str, pieces: AsyncGenerator[bytes, None], *, most_bytes: int
    ) -> Saved:
        inner = await self._portable()
        await self._mark_used()
        return await inner.write_layer(layer, pieces, most_bytes=most_bytes)

    async def settle(self, layers: Sequence[str]) -> None:
        await (await self._layered()).settle(layers)

    async def kept(self) -> Sequence[str]:
        inner = await self._opened() if await self._was_used() else None
        return await inner.kept() if isinstance(inner, Layered) else ()

    async def drop(self, layer: str) -> None:
        await (await self._layered()).drop(layer)

    async def make_volume(self, id: str, *, size: int | None = None) -> None:
        maker = await self._volumed()
        await self._mark_used()
        await maker.make_volume(id, size=size)

    async def look_at_volume(self, id: str) -> VolumeLook:
        return await (await self._volumed()).look_at_volume(id)

    async def volumes(self) -> Sequence[str]:
        inner = await self._opened() if await self._was_used() else None
        return await inner.volumes() if isinstance(inner, Volumed) else ()

    async def drop_volume(self, id: str) -> None:
        await (await self._volumed()).drop_volume(id)

    async def _layered(self) -> Layered:
        inner: object = await self._opened()
        if not isinstance(inner, Layered):
            raise self._cannot("keep the files of a sandbox")
        return inner

    async def _portable(self) -> Portable:
        inner: object = await self._opened()
        if not isinstance(inner, Portable):
            raise self._cannot("give out the files of a snapshot")
        return inner

    async def _volumed(self) -> Volumed:
        inner: object = await self._opened()
        if not isinstance(inner, Volumed):
            raise self._cannot("have volumes")
        return inner

    def _cannot(self, what: str) -> NotSupportedError:
        return NotSupportedError(
            f"provider {self.name} cannot {what}",
            hint="GET /v1/capabilities lists the features of each provider",
        )

    async def _was_used(self) -> bool:
        """It has made something, if only for an earlier server."""
        return self._inner is not None or await asyncio.to_thread(self._mark.exists)

    async def _mark_used(self) -> None:
        with host_errors(f"provider {self.name} cannot be marked as used"):
            await asyncio.to_thread(self._note)

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
