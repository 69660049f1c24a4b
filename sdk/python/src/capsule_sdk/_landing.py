"""Where a downloaded file goes: beside its target until it is whole, then in its place."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import IO


class Landing:
    """`open`, `write`, `finish`; and always `close`, which leaves nothing half done behind."""

    def __init__(self, target: Path, mode: int) -> None:
        self._target = target
        self._mode = mode & 0o777 | 0o600
        self._partial: Path | None = None
        self._file: IO[bytes] | None = None

    def open(self) -> None:
        if self._target.is_symlink():
            self._target = self._target.resolve()  # what it leads to is replaced, not the link
        if self._target.exists() and not self._target.is_file():
            self._file = self._target.open("wb")  # a device or a pipe must not become a file
            return
        # A name nobody can foresee, and only if it is new: never through a link put there for us.
        self._partial = self._target.with_name(f".{secrets.token_hex(8)}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file = os.fdopen(os.open(self._partial, flags, self._mode), "wb")

    def write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)

    def finish(self) -> None:
        assert self._file is not None
        self._file.close()
        if self._partial is not None:
            self._partial.replace(self._target)
            self._partial = None

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a full disk `write` or `finish` has told
                self._file.close()
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
