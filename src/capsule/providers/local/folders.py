"""Folders that a box is mounted from. Its pid 1 is another user on the host and has to pass through
them, whatever umask the server was started with."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(path: Path, mode: int) -> None:
    """What is there already keeps its mode, but for others' way through where that is needed."""
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    now = path.stat()
    if now.st_uid == os.geteuid() and mode & ~now.st_mode & 0o055:
        path.chmod(now.st_mode & 0o7777 | mode & 0o055)


def new_folder(path: Path, mode: int) -> None:
    """Raises FileExistsError."""
    os.mkdir(path, mode)
    os.chmod(path, mode)
