"""What was written is on the disk: it outlives a crash of the machine."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def sync_entry(path: Path) -> None:
    """A file or folder, and its name. Blocks."""
    for each in (path, path.parent):
        sync_file(each)


def sync_file(path: Path) -> None:
    """Without its name. Blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(path: Path) -> None:
    """All that lies on the same file system. Blocks. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)
