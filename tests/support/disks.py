"""File systems that are small, and those that are full."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(base: Path, size: str) -> Iterator[None]:
    """`data` below `base` is a file system of its own, in a file."""
    image, point = base / "disk.img", base / "data"
    point.mkdir(exist_ok=True)
    run("truncate", "-s", size, image)
    run("mkfs.ext4", "-q", "-m", "0", image)
    run("mount", "-o", "loop,discard", image, point)
    try:
        point.chmod(0o711)
        yield
    finally:
        for _ in range(100):  # keepers end a moment after their boxes
            if not subprocess.run(["umount", point], capture_output=True).returncode:
                break
            time.sleep(0.1)
        else:
            run("umount", "-l", point)


def run(*argv: str | Path) -> None:
    subprocess.run(argv, check=True, capture_output=True)


@contextmanager
def filled(folder: Path, leaving: int = 0) -> Iterator[None]:
    """Until the block ends not a byte is left there, or so many."""
    filler = folder / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        size, step = 0, 1 << 30
        while step:  # large pieces first: reserved, not written
            try:
                os.posix_fallocate(fd, size, step)
                size += step
            except OSError as full:
                if full.errno != errno.ENOSPC:
                    raise
                size = os.fstat(fd).st_size
                step //= 2
        if leaving:
            os.ftruncate(fd, size - leaving)
        yield
    finally:
        os.close(fd)
        filler.unlink()
