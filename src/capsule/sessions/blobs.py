"""Contents, each in a file named by its SHA-256: what is the same is there once.

Written under another name first, so that a name always has its content; removed when no record has
its hash any more. What was just added is held until whoever added it has a record of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from capsule.errors import NotFoundError, TooLargeError
from capsule.host_errors import host_errors

# Which of these hashes a record has.
Recorded = Callable[[list[str]], Awaitable[set[str]]]


class Blob(NamedTuple):
    sha256: str
    size: int


class Blobs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: Counter[str] = Counter()
        # What is about to be added again must not be removed in the same moment.
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        await asyncio.to_thread(self._clear)

    async def add(self, pieces: AsyncIterable[bytes], most: int) -> Blob:
        """Held until `release`. Raises TooLargeError, NoSpaceError, and what the pieces raise; then
        nothing is kept."""
        new = await asyncio.to_thread(_New, self._folder)
        try:
            async for piece in pieces:
                if new.size + len(piece) > most:
                    raise TooLargeError(f"more than {most} bytes", limit=most)
                await asyncio.to_thread(new.write, piece)
            async with self._changing:
                blob = await asyncio.to_thread(new.finish)
                self._held[blob.sha256] += 1
            return blob
        finally:
            await asyncio.to_thread(new.close)

    async def add_bytes(self, data: bytes, most: int) -> Blob:
        async def once() -> AsyncIterable[bytes]:
            yield data

        return await self.add(once(), most)

    def release(self, hashes: Iterable[str]) -> None:
        """Whoever added them has a record of them, or wants them no more."""
        self._held.subtract(hashes)
        self._held += Counter()  # forgets those that are at 0

    async def open_file(self, sha256: str) -> BinaryIO:
        """For reading; it can be read to its end, whatever becomes of its name."""
        try:
            return await asyncio.to_thread(self._path(sha256).open, "rb")
        except FileNotFoundError:
            raise NotFoundError(
                "the content of this artifact is gone", hint="it was too old, or too much"
            ) from None

    async def sweep(self, recorded: Recorded) -> int:
        """Remove what no record has; how many those were."""
        removed = 0
        for folder in await asyncio.to_thread(lambda: sorted(self._folder.glob("??"))):
            async with self._changing:
                names = await asyncio.to_thread(os.listdir, folder)
                removed += await self._drop(names, recorded)
        return removed

    async def discard(self, hashes: Iterable[str], recorded: Recorded) -> None:
        """Those of them that no record has."""
        async with self._changing:
            await self._drop(list(hashes), recorded)

    async def _drop(self, names: list[str], recorded: Recorded) -> int:
        # Before the records are asked: who lets go of one has a record of it by then.
        held = set(self._held)
        used = held | await recorded(names)
        gone = [name for name in names if name not in used]
        await asyncio.to_thread(self._unlink, gone)
        return len(gone)

    def _path(self, sha256: str) -> Path:
        return _place(self._folder, sha256)

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def _clear(self) -> None:
        """What a server that was killed has begun."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.glob(".new-*"):
            path.unlink(missing_ok=True)


class _New:
    """A content that is being written. Blocks."""

    def __init__(self, folder: Path) -> None:
        self.size = 0
        self._folder = folder
        self._hash = hashlib.sha256()
        with host_errors(f"cannot write to {folder}"):
            self._fd, self._name = tempfile.mkstemp(dir=folder, prefix=".new-")

    def write(self, piece: bytes) -> None:
        self._hash.update(piece)
        self.size += len(piece)
        with host_errors(f"cannot write to {self._folder}"):
            left = memoryview(piece)
            while left:
                left = left[os.write(self._fd, left) :]

    def finish(self) -> Blob:
        blob = Blob(self._hash.hexdigest(), self.size)
        place = _place(self._folder, blob.sha256)
        with host_errors(f"cannot write to {self._folder}"):
            if not place.exists():
                os.fsync(self._fd)
                place.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(self._name, place)
        return blob

    def close(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):  # it has another name now
            os.unlink(self._name)


def _place(folder: Path, sha256: str) -> Path:
    return folder / sha256[:2] / sha256
