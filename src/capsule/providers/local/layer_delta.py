"""A layer that has what changed since the step before, over the layers of that step.

The agent tells every folder, and whether it has changed; of a folder that has, every name; of one
that has not, only what changed in it. So a folder that has not changed is written when something in
it is, and of one that has, what the layers below show and was not told is deleted. A folder that
the step before did not have hides whatever they have there, and must be told as a whole: if
anything in it has not changed, it was moved there, and the save is made again without a step
before.

An agent that has watched its box tells less: of the folders only those in which something changed,
and of what is gone the names. What it does not mention is as it was.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from capsule.errors import InvalidError, TooLargeError
from capsule.providers.local.layer_folder import MAX_ENTRIES, LayerFolder, content_of, split
from capsule.providers.local.tarball import shown
from capsule.providers.local.unpack import is_deleted, is_opaque

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class _Told:
    """A folder on the way to what is told."""

    path: bytes
    mode: int
    mtime_ns: int
    seen: bool  # by the step before, and all above it
    missing: set[bytes]  # what the step before has in it, and was not told yet
    written: bool = False


class LayerDelta:
    """Takes what a `LayerFolder` does. `below`: the layers of the step before, topmost first, open
    folders of the caller's. `over`: they lie on others."""

    def __init__(
        self, layer: LayerFolder, below: Sequence[int], seen: Collection[int], *, over: bool
    ) -> None:
        self._layer = layer
        self._below = _Below(below)
        self._seen = seen
        self._over = over
        self._way: list[_Told] = []
        self._told = 0
        self.part = False
        self.replaced = 0  # then: bytes of files that those below have, and are changed or gone

    def begin_part(self) -> None:
        self.part = True

    def folder(
        self, path: bytes, mode: int, mtime_ns: int, *, opaque: bool = False, inode: int = 0
    ) -> None:
        """One that has changed, or is new."""
        seen = self._meet(path, inode, opaque=opaque)
        if not seen:
            self._replace(path)
        told = _Told(path, mode, mtime_ns, seen, self._below.names(path) if seen else set())
        self._write_way()
        self._write(told, opaque=not seen and (opaque or self._hides(path)))
        self._way.append(told)

    def same_folder(
        self, path: bytes, mode: int, mtime_ns: int, *, opaque: bool, inode: int
    ) -> None:
        if not self._meet(path, inode, opaque=opaque):
            raise _moved(path)
        self._way.append(_Told(path, mode, mtime_ns, True, set()))

    def part_of_folder(
        self, path: bytes, mode: int, mtime_ns: int, *, opaque: bool, inode: int
    ) -> None:
        """One that has changed; the names that are not told are as they were."""
        self.same_folder(path, mode, mtime_ns, opaque=opaque, inode=inode)
        self._write_way()

    def gone(self, path: bytes) -> None:
        self._arrive(path)
        if not self._way:
            raise InvalidError(f"the layer has lost a folder of the disk: {shown(path)}")
        if self._below.find(path) is not None:
            self.whiteout(path)

    def _meet(self, path: bytes, inode: int, *, opaque: bool) -> bool:
        """Whether the step before had it, and shows it: what is above hides nothing of it."""
        self._arrive(path)
        seen = self._layer.place(path, inode, opaque=opaque) in self._seen
        return seen and (not self._way or self._way[-1].seen)

    def begin_file(
        self, path: bytes, mode: int, mtime_ns: int, size: int, attributes: bytes = b""
    ) -> None:
        self._begin(path)
        self._replace(path)
        self._layer.begin_file(path, mode, mtime_ns, size, attributes)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self._layer.write(offset, data)

    def end_file(self) -> None:
        self._layer.end_file()

    def symlink(self, path: bytes, target: bytes, mtime_ns: int) -> None:
        self._begin(path)
        self._replace(path)
        self._layer.symlink(path, target, mtime_ns)

    def hardlink(self, path: bytes, target: bytes) -> None:
        self._begin(path)
        self._layer.hardlink(path, target)

    def whiteout(self, path: bytes) -> None:
        self._begin(path)
        self._replace(path)
        self._layer.whiteout(path)

    def moved(self, path: bytes, old: bytes) -> None:
        """A file that the step before has at `old`, whose folder came here: the same."""
        self._begin(path)
        self._replace(path)
        split(old)
        folder = self._below.folder_with(old)
        if folder is None or old.rpartition(b"/")[2] != path.rpartition(b"/")[2]:
            raise InvalidError(f"the layer before has no such file: {shown(old)}")
        self._layer.take(path, folder)

    def unchanged(self, path: bytes) -> None:
        """Something that the step before has in the same folder. gVisor does not touch the times of
        a file that gets a further name: then that is missing below."""
        if not self._arrive(path):
            raise InvalidError(f"the layer before has no such file: {shown(path)}")

    def finish(self) -> None:
        self._leave(0)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._below.close()

    def _replace(self, path: bytes) -> None:
        """Unless a folder above it did already."""
        if self.part and self._way and self._way[-1].seen:
            self.replaced += self._below.size(path)

    def _begin(self, path: bytes) -> None:
        self._arrive(path)
        self._write_way()

    def _arrive(self, path: bytes) -> bool:
        """In the folder that it is in; whether the step before has it, too, if the folder was seen
        and has changed. Folders that are not on the way to it are left for good."""
        self._told += 1
        if self._told > MAX_ENTRIES:
            raise TooLargeError(f"the layer has more than {MAX_ENTRIES} files", limit=MAX_ENTRIES)
        split(path)
        parent, _, name = path.rpartition(b"/")
        depth = len(self._way)
        while depth and self._way[depth - 1].path != parent:
            depth -= 1
        if parent and not depth:
            raise InvalidError(f"the layer has a file in no folder of its own: {shown(path)}")
        self._leave(depth)
        if not self._way or name not in self._way[-1].missing:
            return False
        self._way[-1].missing.remove(name)
        return True

    def _leave(self, depth: int) -> None:
        while len(self._way) > depth:
            left = self._way.pop()
            for name in left.missing:
                if self.part:
                    self.replaced += self._below.size(left.path + b"/" + name)
                self._layer.whiteout(left.path + b"/" + name)

    def _write_way(self) -> None:
        for told in self._way:
            if not told.written:
                self._write(told)

    def _write(self, told: _Told, *, opaque: bool = False) -> None:
        self._layer.folder(told.path, told.mode, told.mtime_ns, opaque=opaque)
        told.written = True

    def _hides(self, path: bytes) -> bool:
        """Whether the layers of the step before have a folder in its place."""
        if not self._below.has_folder(path):
            return False
        if self._over:  # it may show what those below them have
            raise _moved(path)
        return True


class _Below:
    """Layers, as they show files together."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots
        self._at = b""
        self._here: list[int] = []  # the parts of the folder that was looked into last

    def has_folder(self, path: bytes) -> bool:
        parts = self._parts(path)
        _close(parts)
        return bool(parts)

    def names(self, path: bytes) -> set[bytes]:
        parts = self._parts(path)
        try:
            return set(_entries(parts))
        finally:
            _close(parts)

    def find(self, path: bytes) -> os.stat_result | None:
        found = self._find(path)
        return None if found is None else found[1]

    def folder_with(self, path: bytes) -> int | None:
        """The part of its folder that has this file; good until the next is looked for."""
        found = self._find(path)
        return found[0] if found and stat.S_ISREG(found[1].st_mode) else None

    def _find(self, path: bytes) -> tuple[int, os.stat_result] | None:
        parent, _, name = path.rpartition(b"/")
        if parent != self._at:
            self.close()
            self._here, self._at = self._parts(parent), parent
        for fd in self._here:
            with suppress(FileNotFoundError):
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                return None if is_deleted(info) else (fd, info)
        return None

    def size(self, path: bytes) -> int:
        """Of its content, or of all that is in it."""
        info = self.find(path)
        if info is None or not stat.S_ISDIR(info.st_mode):
            return content_of(info) if info is not None and stat.S_ISREG(info.st_mode) else 0
        total, waiting = 0, [path]
        while waiting:
            folder = waiting.pop()
            parts = self._parts(folder)
            try:
                for name, entry in _entries(parts).items():
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(folder + b"/" + name)
                    elif entry.is_file(follow_symlinks=False):
                        total += content_of(entry.stat(follow_symlinks=False))
            finally:
                _close(parts)
        return total

    def close(self) -> None:
        _close(self._here)
        self._here, self._at = [], b""

    def _parts(self, path: bytes) -> list[int]:
        """The folder's part in each that has one, topmost first; the caller's."""
        found: list[int] = []
        try:
            for root in self._roots:
                part = _open_below(root, path)
                if part is None:
                    continue
                fd, last = part
                if fd >= 0:
                    found.append(fd)
                if last:
                    break
        except BaseException:
            _close(found)
            raise
        return found


def _open_below(root: int, path: bytes) -> tuple[int, bool] | None:
    """A folder of one layer (-1: something else is in its place), and whether that hides the layers
    below. None: this layer has nothing there."""
    fd, hides = os.dup(root), False
    try:
        for name in path.split(b"/"):
            inner = os.open(name, _DIR, dir_fd=fd)
            os.close(fd)
            fd = inner
            hides = hides or is_opaque(fd)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.ENOENT:
            return (-1, True) if hides else None
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return -1, True
        if error.errno == errno.EACCES:
            raise InvalidError(f"the layer before cannot be read: {shown(path)}") from None
        raise
    return fd, hides


def _entries(parts: Sequence[int]) -> dict[bytes, os.DirEntry[str]]:
    """What they show, by name. To be looked at while they are open."""
    found: dict[bytes, os.DirEntry[str] | None] = {}
    for fd in parts:
        with os.scandir(fd) as entries:
            for entry in entries:
                name = os.fsencode(entry.name)
                found.setdefault(name, None if is_deleted(entry) else entry)
    return {name: entry for name, entry in found.items() if entry is not None}


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _moved(path: bytes) -> InvalidError:
    return InvalidError(f"the layer before had another folder here: {shown(path)}")
