"""The server's directories, and the locks that keep a second server out of them.

Both are locked: records are in one, the boxes' sockets in the other, and a server takes every
box without a record for an orphan.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from capsule.errors import ConflictError, ForbiddenError, NoSpaceError, UnavailableError
from capsule.host_errors import other_folders

_NAME = "lock"


class DirectoryLock:
    """Held until `close`, or until the process ends in whatever way: the kernel lets go then."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, directory: Path) -> Self:
        """Raises ConflictError (another server has it), ForbiddenError, UnavailableError."""
        make_private(directory)
        fd = _open(directory / _NAME)
        with ExitStack() as on_failure:
            on_failure.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise ConflictError(
                    f"another server uses {directory}, process {holder}",
                    hint="stop it, or give this one other directories (data_dir, run_dir)",
                ) from None
            with suppress(OSError):  # who holds it is for people; a full disk may keep it to itself
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            on_failure.pop_all()
        return cls(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        kind = NoSpaceError if error.errno == errno.ENOSPC else UnavailableError
        hint = None if error.errno == errno.ENOSPC else other_folders()
        raise kind(f"cannot open {path}: {error.strerror}", hint=hint) from error


def make_private(directory: Path) -> None:
    """Make it if it is missing, and let nobody else write to it.

    Raises ForbiddenError when it is a link or somebody else's, as may happen in /tmp.
    """
    try:
        # Others may pass: where there are no user namespaces, programs run under uids of their own
        # and have to reach their own folder below. What is private is private by its own mode.
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        about = directory.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
            directory.chmod(stat.S_IMODE(about.st_mode) & ~0o022)
            return
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoSpaceError(f"cannot make {directory}: {error.strerror}") from error
        raise UnavailableError(
            f"cannot make {directory}: {error.strerror}", hint=other_folders()
        ) from error
    raise ForbiddenError(
        f"{directory} is not a directory of uid {os.geteuid()}",
        hint="remove it, or set data_dir and run_dir to others",
    )
