"""What is different between two stacks of layers, as a box would see them.

Only folders in which the two show different layers are looked into. Nothing is mounted, no link is
followed. Of all folders one is open at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from capsule.providers.contract import FileChange
from capsule.providers.local.unpack import is_deleted, is_opaque

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)
# Where the disk's folders are in a box.
PLACES = {
    b"workspace": b"/workspace",
    b"tmp": b"/tmp",
    b"var-tmp": b"/var/tmp",
    b"root": b"/root",
}

Stack = tuple[Path, ...]  # of layers, topmost first
Parts = Sequence[tuple[Path, int]]  # a layer, and its open folder
Names = tuple[bytes, ...]


class Entry(NamedTuple):
    info: os.stat_result
    target: bytes  # of a link

    @property
    def kind(self) -> str:
        mode = self.info.st_mode
        return "dir" if stat.S_ISDIR(mode) else "symlink" if stat.S_ISLNK(mode) else "file"


class Folder:
    """One folder, as the layers show it together: its part in each, topmost first."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def names(self) -> set[bytes]:
        return {os.fsencode(name) for _, fd in self._parts for name in os.listdir(fd)}

    def find(self, name: bytes) -> Entry | None:
        for _, fd in self._parts:
            try:
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if is_deleted(info):
                return None
            link = stat.S_ISLNK(info.st_mode)
            return Entry(info, os.readlink(name, dir_fd=fd) if link else b"")
        return None

    def open(self, name: bytes, flags: int) -> int:
        """A file that `find` has found, the caller's."""
        for _, fd in self._parts:
            try:
                return os.open(name, flags, dir_fd=fd)
            except FileNotFoundError:
                continue
        raise FileNotFoundError(name)

    def inside(self, name: bytes) -> Stack:
        """The layers that have a part in a folder of this one. Raises PermissionError: a part is
        closed to us, and may hide what is below."""
        found: list[Path] = []
        for layer, fd in self._parts:
            try:
                inner = os.open(name, _DIR, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in _NO_FOLDER:
                    raise
                break  # something else of this name hides what is below
            found.append(layer)
            try:
                if is_opaque(inner):
                    break
            finally:
                os.close(inner)
        return tuple(found)


@contextmanager
def opened(layers: Stack, at: Names) -> Iterator[list[tuple[Path, int]]]:
    """A folder's part in each of these, which all have one. From the top of each, so that what is
    open does not grow with the depth, which was a stranger's choice. In one call: whoever asks has
    seen that there are folders all the way, and nobody changes a layer."""
    path = b"/".join(at) or b"."
    held: list[tuple[Path, int]] = []
    try:
        for layer in layers:
            top = os.open(layer, _DIR)
            try:
                held.append((layer, os.open(path, _DIR, dir_fd=top)))
            finally:
                os.close(top)
        yield held
    finally:
        for _, fd in held:
            os.close(fd)


def compare(old: Sequence[Path], new: Sequence[Path], most: int) -> list[FileChange]:
    return list(islice(_changes((tuple(old), tuple(new)), (), b""), most))


def _changes(stacks: tuple[Stack, Stack], at: Names, place: bytes) -> Iterator[FileChange]:
    if stacks[0] == stacks[1]:
        return
    for found in _differing(stacks, at, place):
        if found.change is not None:
            yield found.change
        if found.inside is not None:
            yield from _changes(found.inside, (*at, found.name), found.path)


class _Found(NamedTuple):
    name: bytes
    path: bytes
    change: FileChange | None
    inside: tuple[Stack, Stack] | None  # of folders


def _differing(stacks: tuple[Stack, Stack], at: Names, place: bytes) -> list[_Found]:
    """What of one folder differs, or may differ inside."""
    result: list[_Found] = []
    with opened(stacks[0], at) as old, opened(stacks[1], at) as new:
        before, after = Folder(old), Folder(new)
        for name in sorted(before.names() | after.names()):
            was, now = before.find(name), after.find(name)
            entry = now or was
            if entry is None:
                continue
            path = place + b"/" + name if place else PLACES.get(name, b"/" + name)
            kind = _change(was, now)
            if not place and None in (was, now):
                kind = ""  # a box has these folders, whether or not a layer does
            change = FileChange(path, kind, entry.kind, entry.info.st_size) if kind else None
            folder = "dir" in {each.kind for each in (was, now) if each is not None}
            inside = _inside(before, after, name) if folder else None
            if change is not None or inside is not None:
                result.append(_Found(name, path, change, inside))
    return result


def _inside(before: Folder, after: Folder, name: bytes) -> tuple[Stack, Stack] | None:
    try:
        return before.inside(name), after.inside(name)
    except PermissionError:
        return None  # what cannot be read on one side is not told as added or removed


def _change(was: Entry | None, now: Entry | None) -> str:
    if was is None or now is None:
        return "added" if was is None and now else "removed" if was else ""
    if was.kind != now.kind:
        return "modified"
    if was.kind == "dir":
        return "" if was.info.st_mode == now.info.st_mode else "modified"
    if (was.info.st_ino, was.info.st_dev) == (now.info.st_ino, now.info.st_dev):
        return ""
    same = (was.info.st_mode, was.info.st_size, was.info.st_mtime_ns, was.target)
    return "" if same == _like(now) else "modified"


def _like(entry: Entry) -> tuple[int, int, int, bytes]:
    return (entry.info.st_mode, entry.info.st_size, entry.info.st_mtime_ns, entry.target)
