"""What is different between two stacks of layers, as a box would see them.

Only folders that one of the layers has in which the stacks differ are looked into: the layers that
both have below are the same for both. Nothing is mounted, no link is followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from capsule.providers.contract import FileChange
from capsule.providers.local.unpack import is_opaque

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Where the disk's folders are in a box.
PLACES = {b"workspace": b"/workspace", b"tmp": b"/tmp", b"var-tmp": b"/var/tmp"}


class Entry(NamedTuple):
    info: os.stat_result
    target: bytes  # of a link

    @property
    def kind(self) -> str:
        mode = self.info.st_mode
        return "dir" if stat.S_ISDIR(mode) else "symlink" if stat.S_ISLNK(mode) else "file"


class Folder:
    """One folder, as the layers show it together: its part in each, topmost first."""

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        self._parts = parts  # which layer, and its open folder

    def layers(self) -> set[int]:
        return {number for number, _ in self._parts}

    def names(self) -> set[bytes]:
        return {os.fsencode(name) for _, fd in self._parts for name in os.listdir(fd)}

    def find(self, name: bytes) -> Entry | None:
        for _, fd in self._parts:
            try:
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISCHR(info.st_mode):
                return None  # deleted here
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

    def enter(self, name: bytes) -> Folder:
        found: list[tuple[int, int]] = []
        for number, fd in self._parts:
            try:
                inner = os.open(name, _DIR, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError:
                break  # something else of this name hides what is below
            found.append((number, inner))
            if is_opaque(inner):
                break
        return Folder(found)

    def close(self) -> None:
        for _, fd in self._parts:
            os.close(fd)


def open_stack(stack: Sequence[Path], numbers: dict[Path, int]) -> Folder:
    return Folder([(numbers[path], os.open(path, _DIR)) for path in stack])


def compare(old: Sequence[Path], new: Sequence[Path], most: int) -> list[FileChange]:
    numbers = {path: n for n, path in enumerate(dict.fromkeys([*old, *new]))}
    shared = 0
    while shared < min(len(old), len(new)) and old[-1 - shared] == new[-1 - shared]:
        shared += 1
    own = {numbers[path] for path in (*old[: len(old) - shared], *new[: len(new) - shared])}
    before, after = open_stack(old, numbers), open_stack(new, numbers)
    try:
        return list(islice(_changes(before, after, own, b""), most))
    finally:
        before.close()
        after.close()


def _changes(before: Folder, after: Folder, own: set[int], place: bytes) -> Iterator[FileChange]:
    if not own & (before.layers() | after.layers()):
        return
    for name in sorted(before.names() | after.names()):
        was, now = before.find(name), after.find(name)
        path = place + b"/" + name if place else PLACES.get(name, b"/" + name)
        change = _change(was, now)
        entry = now or was
        if change and entry is not None:
            yield FileChange(path, change, entry.kind, entry.info.st_size)
        if entry is not None and "dir" in {each.kind for each in (was, now) if each is not None}:
            inner = (before.enter(name), after.enter(name))
            try:
                yield from _changes(*inner, own, path)
            finally:
                for folder in inner:
                    folder.close()


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
