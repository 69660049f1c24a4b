"""Layers of boxes whose files are not ours: what they have written, kept on the server's own disk,
as the local provider keeps it (`local/layers.py`).

Their agents tell it, over whichever way they are reached by; an Engine or a cloud is not asked, and
nothing of it is left there. A container whose disk is an image of ours begins from layers by an
overlay (`docker/disks.py`): nothing is copied, and what it tells later is what it changed. One
whose disk is in memory, or on another host, is filled through its agent before it is handed out,
and tells all that it has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from capsule.errors import CapsuleError, NoSpaceError
from capsule.host_errors import host_errors
from capsule.link.link import AgentLink
from capsule.providers.cleanup import to_the_end
from capsule.providers.contract import ByteStream, FileChange, Mark, Saved
from capsule.providers.local.layer_diff import compare
from capsule.providers.local.layer_stream import told
from capsule.providers.local.layers import Layers, next_batch

MOST = 24  # overlayfs takes their paths in one page


class Told(Protocol):
    """A box that tells its files."""

    async def connect(self) -> ByteStream: ...

    async def paused(self) -> bool:
        """Then its agent does not answer."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    @property
    def over_layers(self) -> bool:
        """Whether its disk lies over layers; else it has copies of them."""


class BoxLayers:
    def __init__(self, folder: Path, *, owner: int) -> None:
        """`owner`: who programs are, in boxes that begin from the folder as it is."""
        root = os.geteuid() == 0
        # Who is not root could not read what its owner may not: it keeps a little more of the mode.
        self._layers = Layers(folder, owner=owner if root else None, readable=not root)

    def prepare(self) -> None:
        """Blocks."""
        self._layers.prepare()

    async def paths(self, ids: Sequence[str]) -> list[Path]:
        """Raises NotFoundError."""
        return await asyncio.to_thread(lambda: [self._layers.path(id) for id in ids])

    async def save(
        self, box: Told, layer: str, *, full: bool, most_bytes: int, since: Mark | None
    ) -> Saved:
        async with _awake(box):
            link = AgentLink(box.connect)
            saved = await self._layers.save(
                link, layer, full=full, most_bytes=most_bytes, since=since
            )
        return replace(saved, whole=full or not box.over_layers)

    async def merge(self, id: str, stack: Sequence[str], *, count: int) -> Saved:
        return await self._layers.merge(id, stack, count=count)

    async def fill(self, box: Told, layers: Sequence[Path]) -> None:
        """Raises NoSpaceError, UnavailableError."""
        try:
            async with aclosing(_read(told(layers))) as pieces:
                await AgentLink(box.connect).fill(pieces)
        except NoSpaceError as exc:
            raise NoSpaceError(
                "the snapshot does not fit on the sandbox's disk",
                hint="create it with a larger disk: here what it begins from counts, too",
            ) from exc
        except CapsuleError as exc:
            exc.message = f"the sandbox's files cannot be restored: {exc.message}"
            raise

    async def diff(
        self, old: Sequence[str], new: Sequence[str], *, most: int
    ) -> Sequence[FileChange]:
        stacks = await self.paths(old), await self.paths(new)
        with host_errors("layers cannot be compared"):
            return await asyncio.to_thread(compare, *stacks, most)

    def give_out(self, ids: Sequence[str], *, most_bytes: int) -> AsyncGenerator[bytes, None]:
        return self._layers.give_out(ids, most_bytes=most_bytes)

    async def take_in(
        self, id: str, pieces: AsyncGenerator[bytes, None], *, most_bytes: int
    ) -> Saved:
        return await self._layers.take_in(id, pieces, most_bytes=most_bytes)

    async def settle(self) -> None:
        await self._layers.settle()

    async def kept(self) -> Sequence[str]:
        with host_errors("layers cannot be listed"):
            return await asyncio.to_thread(self._layers.ids)

    async def drop(self, layer: str) -> None:
        with host_errors("a layer cannot be removed"):
            await asyncio.to_thread(self._layers.remove, layer)


@asynccontextmanager
async def _awake(box: Told) -> AsyncIterator[None]:
    """Its agent answers meanwhile. Programs of a paused box run, too, until it stops them."""
    if not await box.paused():
        yield
        return
    try:
        await box.resume()
        yield
    finally:
        await to_the_end(box.pause())


async def _read(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    with host_errors("a layer cannot be read"):
        while batch := await next_batch(pieces):
            yield batch
