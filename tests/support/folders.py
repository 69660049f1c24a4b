"""Folders for servers' data, and what the servers of one test run share below them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED = "CAPSULE_TEST_SHARED"


def share_for_the_run() -> Path | None:
    """In the process that leads a test run: makes what all its workers share, to be removed."""
    if SHARED in os.environ:
        return None
    made = Path(tempfile.mkdtemp(prefix="capsule-shared-", dir="/tmp"))
    made.chmod(0o711)
    os.environ[SHARED] = str(made)
    return made


def share_roots(data: Path) -> None:
    """Let a server whose data is there find the skeletons of boxes that an earlier one made.

    They are almost a thousand files, named after their content and never changed. To make and
    remove them for each server took longer than most tests, half of that in the filesystem.
    """
    roots = Path(os.environ[SHARED], f"roots-{os.geteuid()}")
    roots.mkdir(exist_ok=True)
    data.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(data / "roots"):
        (data / "roots").symlink_to(roots)


@contextmanager
def server_folder(prefix: str, *, mode: int = 0o711, data: str | None = "d") -> Iterator[Path]:
    """Short, for Unix sockets, and open to the users that boxes run as, unlike pytest's own.

    `data` is where in it a server will keep its data, if that is known.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    path.chmod(mode)
    if data:
        share_roots(path / data)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
