"""A stack of layers as one stream, in the form in which a box's files came (spec/agent-protocol.md:
save), for a box that cannot have layers below its disk.

Walked as overlayfs would merge them; nothing is mounted, no link is followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from capsule.providers.local.layer_attributes import packed
from capsule.providers.local.layer_diff import Entry, Folder, Names, Stack, opened
from capsule.providers.local.layers import EXTENT, HEAD

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 256 * 1024


def told(stack: Sequence[Path]) -> Iterator[bytes]:
    """In pieces; topmost layer first. Blocks."""
    return _Teller().all(tuple(stack))


class _Inner(NamedTuple):
    path: bytes
    entry: Entry
    at: Names
    layers: Stack


class _Teller:
    def __init__(self) -> None:
        self._names: dict[tuple[int, int], bytes] = {}  # of files with several, the first

    def all(self, stack: Stack) -> Iterator[bytes]:
        """A folder before what is in it, and all of that before what is beside it."""
        todo: list[_Inner] = []
        yield from self._folder(b"", (), stack, todo)
        while todo:
            path, entry, at, layers = todo.pop()
            yield _head(b"d", path, entry)
            yield from self._folder(path, at, layers, todo)

    def _folder(
        self, place: bytes, at: Names, layers: Stack, todo: list[_Inner]
    ) -> Iterator[bytes]:
        inner: list[_Inner] = []
        with opened(layers, at) as parts:
            folder = Folder(parts)
            for name in sorted(folder.names()):
                entry = folder.find(name)
                if entry is None:
                    continue
                path = place + b"/" + name if place else name
                if entry.kind == "dir":
                    inner.append(_Inner(path, entry, (*at, name), folder.inside(name)))
                elif entry.kind == "symlink":
                    yield _head(b"l", path, entry, entry.target)
                else:
                    yield from self._file(folder, name, path, entry)
        todo += reversed(inner)

    def _file(self, folder: Folder, name: bytes, path: bytes, entry: Entry) -> Iterator[bytes]:
        first = self._names.setdefault((entry.info.st_dev, entry.info.st_ino), path)
        if first != path:
            yield _head(b"h", path, entry, first)
            return
        fd = folder.open(name, _FILE)
        try:
            yield _head(b"f", path, entry, packed(fd))
            yield from _extents(fd, entry.info.st_size)
        finally:
            os.close(fd)
        yield EXTENT.pack(0, 0)


def _head(kind: bytes, path: bytes, entry: Entry, target: bytes = b"") -> bytes:
    seconds, nanos = divmod(entry.info.st_mtime_ns, 10**9)
    size = entry.info.st_size if kind == b"f" else 0
    mode = stat.S_IMODE(entry.info.st_mode)
    head = HEAD.pack(kind, mode, seconds, nanos, size, len(path), len(target))
    return head + path + target


def _extents(fd: int, size: int) -> Iterator[bytes]:
    """Without its holes."""
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            return
        end = min(os.lseek(fd, at, os.SEEK_HOLE), size)
        while at < end:
            piece = os.pread(fd, min(_PIECE, end - at), at)
            if not piece:
                raise OSError(f"a file of a layer became shorter, {end - at} bytes are missing")
            yield EXTENT.pack(at, len(piece))
            yield piece
            at += len(piece)
