"""Remove a tree that a stranger has shaped: of any depth, with any names and modes, full of links.

`shutil.rmtree` recurses and gives up at a depth of about a thousand; a descriptor per level runs
out at about the same. Here every folder that is found deeper down is first moved up to the top, so
that two descriptors and no recursion are enough.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Returns when `path` is gone; fine if it never was. Nothing outside of it is touched.

    Nobody else may change the tree meanwhile, except to remove it as well.
    """
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            remove_entry(parent, os.fsencode(path.name))
    finally:
        os.close(parent)


def remove_entry(parent: int, name: bytes) -> None:
    """The same for an entry of an open folder. Raises FileNotFoundError."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except IsADirectoryError:
        pass
    except PermissionError:  # what POSIX says for a folder, and some file systems do
        if not _is_dir(parent, name):
            raise
    top = _open_dir(parent, name)
    try:
        _empty(top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _empty(top: int) -> None:
    token, count = secrets.token_hex(8).encode(), 0
    folders = _unlink_files(top)
    while folders:
        name = folders.pop()
        child = _open_dir(top, name)
        try:
            for inner in _unlink_files(child):
                count += 1
                fresh = b"%s-%d" % (token, count)
                _move(child, inner, top, fresh)
                folders.append(fresh)
        finally:
            os.close(child)
        os.rmdir(name, dir_fd=top)


def _unlink_files(folder: int) -> list[bytes]:
    """Unlink everything that is not a folder; return the folders."""
    folders: list[bytes] = []
    with os.scandir(folder) as entries:
        found = [
            (os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries
        ]
    for name, is_dir in found:
        if is_dir:
            folders.append(name)
        else:
            os.unlink(name, dir_fd=folder)
    return folders


def _open_dir(parent: int, name: bytes) -> int:
    """Open a folder so that its entries can be removed, whatever its mode was."""

    def attempt() -> int:
        fd = os.open(name, _OPEN_DIR, dir_fd=parent)
        if os.fstat(fd).st_mode & 0o700 != 0o700:
            with suppress(PermissionError):
                os.fchmod(fd, 0o700)
        return fd

    return _with_rights(parent, name, attempt)


def _move(source: int, name: bytes, target: int, fresh: bytes) -> None:
    """Moving a folder writes its `..`, so it takes the right to write to the folder itself."""
    _with_rights(source, name, lambda: os.rename(name, fresh, src_dir_fd=source, dst_dir_fd=target))


def _with_rights(parent: int, name: bytes, action: Callable[[], T]) -> T:
    try:
        return action()
    except PermissionError:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)  # there is no fchmod for a path descriptor
        finally:
            os.close(fd)
        return action()


def _is_dir(parent: int, name: bytes) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
