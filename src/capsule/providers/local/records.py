"""The one small file per box from which a server that knows nothing can adopt it or sweep it up.

It is written before anything else of the box exists and removed, with its directory, after
everything else. `create` and `complete` run on the event loop: a few microseconds on a tmpfs, less
than a thread costs, or than to join a `Path`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from capsule.errors import CapsuleError, ConflictError
from capsule.host_errors import host_error

FILE = "box.json"
SOCKET = "agent.sock"


def create(directory: Path, record: Mapping[str, Any]) -> None:
    """Raises ConflictError when the id is taken, and what keeps the host from writing."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        raise ConflictError(f"a box with this id exists already: {directory.name}") from None
    except OSError as exc:
        raise host_error("no directory for the box", exc) from exc
    try:
        _write(directory, record)
    except OSError as exc:
        shutil.rmtree(directory, ignore_errors=True)
        raise host_error("no record for the box", exc) from exc


def complete(directory: Path, record: Mapping[str, Any]) -> None:
    """Replaces the record with what is known once the box runs. A box that is gone stays so."""
    with contextlib.suppress(OSError):
        _write(directory, record)


def amend(directory: Path, more: Mapping[str, Any]) -> None:
    """Likewise, with what is known later. Blocks; what the host refuses is not noted."""
    with contextlib.suppress(OSError, CapsuleError):
        if record := read(directory):
            _write(directory, {**record, **more})


def _write(directory: Path, record: Mapping[str, Any]) -> None:
    draft = f"{directory}/.{FILE}"
    # Nothing waits here whatever the flag says; it tells tools that look for blocking calls.
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        os.write(fd, json.dumps(record).encode())
    finally:
        os.close(fd)
    os.replace(draft, f"{directory}/{FILE}")


def read(directory: Path) -> dict[str, Any] | None:
    """None: there is no such box. A damaged record is an empty one, so it can be swept.

    Raises what keeps this host from reading it just now (no file descriptor left).
    """
    try:
        record = json.loads((directory / FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {} if os.path.lexists(directory) else None
    except OSError as exc:
        raise host_error("the record of a box cannot be read", exc) from exc
    return record if isinstance(record, dict) else {}


def read_all(parent: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(parent)):
            record = None if name.startswith(".") else read(parent / name)
            if record is not None:
                yield name, record


def exists(directory: Path) -> bool:
    try:
        os.lstat(directory)
    except OSError:
        return False
    return True
