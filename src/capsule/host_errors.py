"""What the host's refusals mean to a caller: the one place where an OSError becomes ours."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from capsule.errors import CapacityError, CapsuleError, NoSpaceError, UnavailableError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EROFS, errno.EACCES)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def host_error(what: str, error: OSError) -> CapsuleError:
    why = f"{what}: {error.strerror or error}"
    if error.errno in _FULL:
        return NoSpaceError(why, hint="free some space below data_dir and run_dir")
    if is_scarce(error):
        return CapacityError(why, hint="the host is at a limit; delete sandboxes")
    text = f"{why}: {error.filename}" if error.filename else why
    return UnavailableError(text, hint=other_folders() if error.errno in _CLOSED else None)


def other_folders() -> str:
    return (
        "set CAPSULE_DATA_DIR and CAPSULE_RUN_DIR to folders that uid "
        f"{os.geteuid()} can make and write to"
    )


def is_scarce(error: OSError) -> bool:
    """Whether it says that the host has nothing left just now, and nothing about what was asked."""
    return error.errno in _SCARCE


@contextmanager
def host_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise host_error(what, exc) from exc
