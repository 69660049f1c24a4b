"""Layers on this host: what boxes have written, kept as folders that others start from.

data_dir/layers/ID is whole or not there: a layer is written as `.ID` and renamed. The names in it
are the disk's folders (workspace, tmp, var-tmp, root), its files have the uids that programs see.
Each is relative to the layers below it, which whoever keeps records knows; here they are folders.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from capsule.errors import InvalidError, NotFoundError, UnavailableError
from capsule.host_errors import host_errors
from capsule.link.link import AgentLink
from capsule.providers.cleanup import to_the_end
from capsule.providers.contract import Mark, Saved
from capsule.providers.feed import fed
from capsule.providers.local.folders import make_folder
from capsule.providers.local.layer_delta import LayerDelta
from capsule.providers.local.layer_folder import LayerFolder
from capsule.providers.local.layer_merge import merge
from capsule.providers.local.layer_tar import Packer, unpack
from capsule.providers.local.removal import remove_tree
from capsule.providers.local.seen_folders import SeenFolders
from capsule.providers.local.settled import sync_file_system

HEAD = struct.Struct(">cHqIQHH")
EXTENT = struct.Struct(">QI")
BATCH = 1024 * 1024
PATIENT_BATCH = 8 * BATCH  # where nothing may be left to do when all has come: 200,000 names


class Before(NamedTuple):
    """What a box has told before: its layers, topmost first, and their folders."""

    ids: Sequence[str]
    seen: Collection[int]
    over: bool = False
    delta: bool = False  # these lie below what is written


class Layers:
    def __init__(self, folder: Path, *, owner: int | None, readable: bool = False) -> None:
        """`readable`: to whoever writes them, whatever their modes in the box."""
        self.folder = folder
        self._owner = owner
        self._least = 0o700 if readable else 0
        self._seen = SeenFolders()

    def prepare(self) -> None:
        """Drafts of a server that was killed are removed. Blocks."""
        make_folder(self.folder, 0o711)
        for name in os.listdir(self.folder):
            if name.startswith("."):
                remove_tree(self.folder / name)

    def path(self, id: str) -> Path:
        """Raises NotFoundError."""
        path = self._path(id)
        if not path.is_dir():
            raise NotFoundError(f"layer {id} is not on this host any more")
        return path

    def _path(self, id: str) -> Path:
        if not id.isalnum():
            raise InvalidError(f"not the name of a layer: {id[:80]!r}")
        return self.folder / id

    def ids(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(self.folder) if not name.startswith(".")]
        return []

    async def settle(self) -> None:
        """On return a crash of the machine loses nothing of any layer. One call for all files of a
        layer: to fsync each of thousands takes far longer than what others have not written yet."""
        with host_errors("the snapshot cannot be written"):
            await to_the_end(asyncio.to_thread(sync_file_system, self.folder))

    def remove(self, id: str) -> None:
        """Renamed first: half a layer must not look like one, and of two who remove it one does.
        What it could not remove goes with the next start. Blocks."""
        draft = self.folder / f".{id}"
        self._seen.forget(id)
        with suppress(FileNotFoundError):
            os.rename(self._path(id), draft)
            remove_tree(draft)

    async def save(
        self,
        link: AgentLink,
        id: str,
        *,
        full: bool,
        most_bytes: int,
        since: Mark | None,
        watch: bool = True,
    ) -> Saved:
        """What a box has written, as its agent tells it; see `Layered.save`. `watch`: the agent may
        watch folders until the next one. Of a layer that an
        earlier server wrote nothing is taken: which folders it had is not known any more."""
        before = self._before(since)
        at = since.at if since and before else 0.0
        about: dict[str, Any] = {}
        difference = before is not None and before.delta
        pieces = link.save(
            about, full=full, since=at, difference=difference, row=since is not None, watch=watch
        )
        saved = await self.write(
            id,
            pieces,
            most_bytes=most_bytes,
            before=before,
            same=lambda: about.get("changed") == 0,
        )
        return replace(
            saved,
            changed=about.get("changed") != 0,
            at=float(about.get("at") or 0.0),
            below=_below(saved, int(about.get("kept") or 0), since),
        )

    def _before(self, since: Mark | None) -> Before | None:
        seen = self._seen.of(since.layers[0]) if since and since.layers else None
        if since is None or seen is None:
            return None
        # An older agent tells no inodes, and no differences.
        return Before(since.layers, seen, over=since.over, delta=since.delta and bool(seen))

    async def write(
        self,
        id: str,
        pieces: AsyncGenerator[bytes, None],
        *,
        most_bytes: int,
        before: Before | None = None,
        same: Callable[[], bool] = lambda: False,
    ) -> Saved:
        """All or nothing. `same` is asked when all has come: whether it is what `before` has. Then
        nothing is written, and the layer is not there.

        Raises InvalidError, TooLargeError, NoSpaceError, what `pieces` does.
        """
        fill = Fill(self, id, most_bytes, before)
        batch_size = BATCH if before is None else PATIENT_BATCH
        try:
            with host_errors("the snapshot cannot be written"):
                await to_the_end(asyncio.to_thread(fill.open))
                parser = Parser(fill.delta or fill.layer)
                async with aclosing(pieces):
                    waiting = bytearray()
                    async for piece in pieces:
                        waiting += piece
                        if len(waiting) >= batch_size:
                            batch, waiting = waiting, bytearray()
                            await to_the_end(asyncio.to_thread(parser.feed, batch))
                    if before is not None and not fill.layer.entries and same():
                        await to_the_end(asyncio.to_thread(fill.drop))
                        return Saved(size=0, files=0, changed=False)
                    await to_the_end(asyncio.to_thread(parser.feed, waiting))
                parser.end()
                saved = await to_the_end(asyncio.to_thread(fill.keep))
        except BaseException:
            await to_the_end(asyncio.to_thread(fill.drop))
            raise
        self._seen.note(
            id,
            fill.layer.places,
            instead_of=before.ids[0] if before else None,
            also=fill.delta is not None and fill.delta.part,
        )
        return saved

    async def merge(self, id: str, stack: Sequence[str], *, count: int) -> Saved:
        """The topmost layers of a stack as one (`layer_merge`); see `Merging.merge`."""
        fill = Fill(self, id, most_bytes=0)

        def work() -> Saved:
            paths = [self.path(each) for each in stack]
            fill.open()
            merge(paths[:count], paths[count:], fill.layer)
            return fill.keep()

        try:
            with host_errors("layers cannot be merged"):
                saved = await to_the_end(asyncio.to_thread(work))
        except BaseException:
            await to_the_end(asyncio.to_thread(fill.drop))
            raise
        self._seen.note_same(id, stack[0])
        return saved

    async def take_in(
        self, id: str, pieces: AsyncGenerator[bytes, None], *, most_bytes: int
    ) -> Saved:
        """The same from a tar of somebody's (`layer_tar`)."""
        fill = Fill(self, id, most_bytes)
        try:
            with host_errors("the snapshot cannot be written"):
                await to_the_end(asyncio.to_thread(fill.open))
                await fed(pieces, lambda feed: unpack(feed, fill.layer, most_bytes=most_bytes))
                return await to_the_end(asyncio.to_thread(fill.keep))
        except BaseException:
            await to_the_end(asyncio.to_thread(fill.drop))
            raise

    async def give_out(self, ids: Sequence[str], *, most_bytes: int) -> AsyncGenerator[bytes, None]:
        """A stack, topmost first, as a tar without its end."""

        def begin() -> Generator[bytes]:
            packer = Packer([self.path(id) for id in ids], most_bytes=most_bytes)
            packer.check()
            return packer.pieces()

        with host_errors("the snapshot cannot be read"):
            pieces = await to_the_end(asyncio.to_thread(begin))
            try:
                while batch := await next_batch(pieces):
                    yield batch
            finally:
                pieces.close()


def _below(saved: Saved, kept: int, since: Mark | None) -> int:
    """Bytes of the box's own files that a step's layer leaves to those below it."""
    if not saved.delta or since is None:
        return 0
    return kept if saved.replaced is None else max(0, since.size - saved.replaced)


async def next_batch(pieces: Iterator[bytes]) -> bytes:
    """About a mebibyte, nothing at the end: a thread for each piece would cost more than it."""
    return await to_the_end(asyncio.to_thread(_batch, pieces))


def _batch(pieces: Iterator[bytes]) -> bytes:
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        if len(waiting) >= BATCH:
            break
    return bytes(waiting)


class Fill:
    """A layer that is being written: `keep` or `drop` ends it. Blocks."""

    layer: LayerFolder

    def __init__(
        self,
        layers: Layers,
        id: str,
        most_bytes: int,
        before: Before | None = None,
    ) -> None:
        self._layers = layers
        self._before = before
        self._below: list[int] = []
        self.delta: LayerDelta | None = None
        self._final = layers._path(id)
        self._draft = layers.folder / f".{id}"
        self._most = most_bytes
        self._owner = layers._owner
        self._root = -1

    def open(self) -> None:
        os.mkdir(self._draft, 0o700)
        self._root = os.open(self._draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        before = self._before
        for id in before.ids if before else ():
            path = self._layers.path(id)
            self._below.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self.layer = LayerFolder(
            self._root,
            most_bytes=self._most,
            owner=self._owner,
            before=self._below,
            seen=before.seen if before else (),
            least=self._layers._least,
        )
        if before and before.delta:
            self.delta = LayerDelta(self.layer, self._below, before.seen, over=before.over)

    def keep(self) -> Saved:
        if self.delta is not None:
            self.delta.finish()
        self.layer.finish()
        self._close()
        os.rename(self._draft, self._final)
        written, taken = self.layer.bytes, self.layer.taken
        return Saved(
            size=written + taken,
            files=self.layer.entries,
            copied=written,
            delta=self.delta is not None,
            replaced=self.delta.replaced if self.delta and self.delta.part else None,
        )

    def drop(self) -> None:
        if self.delta is not None:
            self.delta.close()
        if hasattr(self, "layer"):
            self.layer.close()
        self._close()
        remove_tree(self._draft)

    def _close(self) -> None:
        for fd in (self._root, *self._below):
            if fd >= 0:
                os.close(fd)
        self._root, self._below = -1, []


class Parser:
    """The agent's save stream, in pieces of any size, into a folder."""

    def __init__(self, layer: LayerFolder | LayerDelta) -> None:
        self._layer = layer
        self._held = bytearray()
        self._in_file = False
        self._offset = 0
        self._left = 0  # of the current extent

    def feed(self, data: bytes | bytearray) -> None:
        self._held += data
        view = memoryview(bytes(self._held))
        at = 0
        while (used := self._take(view[at:])) > 0:
            at += used
        del self._held[:at]

    def end(self) -> None:
        if self._held or self._in_file:
            raise UnavailableError("what the box has written did not come to its end")

    def _take(self, view: memoryview) -> int:
        """How much of it was used; 0: more is needed."""
        if self._left:
            return self._take_data(view)
        return self._take_extent(view) if self._in_file else self._take_entry(view)

    def _take_data(self, view: memoryview) -> int:
        piece = view[: self._left]
        self._layer.write(self._offset, piece)
        self._offset += len(piece)
        self._left -= len(piece)
        return len(piece)

    def _take_extent(self, view: memoryview) -> int:
        if len(view) < EXTENT.size:
            return 0
        self._offset, self._left = EXTENT.unpack_from(view)
        if not self._left:
            self._layer.end_file()
            self._in_file = False
        return EXTENT.size

    def _take_entry(self, view: memoryview) -> int:
        if len(view) < HEAD.size:
            return 0
        kind, mode, seconds, nanos, size, name_size, target_size = HEAD.unpack_from(view)
        whole: int = HEAD.size + name_size + target_size
        if len(view) < whole:
            return 0
        name = bytes(view[HEAD.size : HEAD.size + name_size])
        target = bytes(view[HEAD.size + name_size : whole])
        time = max(-(2**62), min(seconds * 10**9 + nanos, 2**62))
        match kind:
            case b"d" | b"D":
                self._layer.folder(name, mode, time, opaque=kind == b"D", inode=size)
            case b"e" | b"E" if isinstance(self._layer, LayerDelta):
                self._layer.same_folder(name, mode, time, opaque=kind == b"E", inode=size)
            case b"p" | b"P" if isinstance(self._layer, LayerDelta):
                self._layer.part_of_folder(name, mode, time, opaque=kind == b"P", inode=size)
            case b"g" if isinstance(self._layer, LayerDelta):
                self._layer.gone(name)
            case b"m" if isinstance(self._layer, LayerDelta):
                self._layer.moved(name, target)
            case b"o" if isinstance(self._layer, LayerDelta):
                self._layer.begin_part()
            case b"f":
                self._layer.begin_file(name, mode, time, size, target)
                self._in_file = True
            case b"l":
                self._layer.symlink(name, target, time)
            case b"h":
                self._layer.hardlink(name, target)
            case b"u":
                self._layer.unchanged(name)
            case b"w":
                self._layer.whiteout(name)
            case _:
                raise InvalidError(f"the layer has an entry of unknown kind {kind!r}")
        return whole
