"""Volumes with a size: the room that their images have on the host's disk, and the state of the
file systems in them.

An image is a file of ext4. What is acknowledged in it must find room on the host's disk later, so
all of its blocks are reserved; a write that fails there aborts the file system for all that have
it. What it says of itself is read on its device while boxes have it: the newest blocks are there.
All of it blocks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from capsule.errors import NoSpaceError
from capsule.model import SYSTEM_PATH

log = structlog.get_logger(__name__)

_SUPERBLOCK = 1024
_BLOCK = 4096
_MAGIC = 0xEF53
_HAS_ERRORS = 2  # in the superblock's state
_REPAIRED = 1  # exit code of e2fsck: all errors are corrected
_REPAIR_WITHIN = 300.0
_libc = ctypes.CDLL(None, use_errno=True)


class Room(NamedTuple):
    free: int
    most: int  # of it, what may be reserved: the server needs some itself


class State(NamedTuple):
    used: int
    damaged: bool


def room_on(folder: Path) -> Room:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    return Room(free, free - free // 20)


def reserve(image: Path) -> None:
    """All of its blocks; none where the host's file system cannot (see `unreserved`). Raises
    NoSpaceError, OSError."""
    size, missing = image.stat().st_size, unreserved(image)
    free, most = room_on(image.parent)
    if missing > most:
        raise NoSpaceError(
            f"{missing} bytes cannot be reserved for the volume: {free} are free on the disk of "
            f"data_dir, {most} may be taken",
            hint="take a smaller size, or free some space there",
            size=size,
            free=free,
            limit=most,
        )
    with open(image, "r+b") as file:
        if _libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            number = ctypes.get_errno()
            if number != errno.EOPNOTSUPP:
                raise OSError(number, os.strerror(number))


def unreserved(image: Path) -> int:
    """Bytes of it without a block on the host's disk."""
    found = image.stat()
    return max(found.st_size - found.st_blocks * 512, 0)


def look(image: Path) -> State:
    """What its superblock and its group descriptors say."""
    with open(_device(image) or image, "rb") as file:
        head = file.read(_BLOCK)[_SUPERBLOCK:]
        blocks, first, in_group = (_u32(head, at) for at in (4, 20, 32))
        magic, state = struct.unpack_from("<HH", head, 56)
        if magic != _MAGIC or not in_group:
            return State(0, damaged=True)
        width = struct.unpack_from("<H", head, 254)[0] or 32
        blocks |= _u32(head, 0x150) << 32
        table = file.read(-(-(blocks - first) // in_group) * width)
    free = sum(struct.unpack_from("<H", table, at + 12)[0] for at in range(0, len(table), width))
    if width >= 64:
        high = (struct.unpack_from("<H", table, at + 44)[0] for at in range(0, len(table), width))
        free += sum(high) << 16
    return State((blocks - free) * _BLOCK, bool(state & _HAS_ERRORS))


def repair(image: Path) -> None:
    """If it is damaged and no box has it. Whether that helped `look` says."""
    fsck = find_fsck()
    if fsck is None or not look(image).damaged:
        return
    with open(image, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a keeper does while it mounts it
        if _device(image) is not None:
            return
        command = [str(fsck), "-p", str(image)]
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, capture_output=True, timeout=_REPAIR_WITHIN, stdin=subprocess.DEVNULL
            )
            log.warning(
                "volume checked after an error",
                image=str(image),
                repaired=done.returncode <= _REPAIRED,
                said=done.stdout.decode(errors="replace")[-1000:],
            )


def find_fsck() -> Path | None:
    found = shutil.which("e2fsck", path=SYSTEM_PATH)
    return Path(found) if found else None


def _device(image: Path) -> Path | None:
    """That it has while boxes do. Its name is like no other's."""
    for at in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if Path(at.read_text().rstrip("\n")).name == image.name:
                return Path("/dev", at.parts[3])
    return None


def _u32(data: bytes, at: int) -> int:
    found: int = struct.unpack_from("<I", data, at)[0]
    return found
