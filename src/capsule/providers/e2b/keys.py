"""Keys that came with a create: what a later server needs to find the sandbox, and nobody may read.

They are in a box's handle, sealed (Fernet) with a secret that is a file of the data directory: who
has the records alone has no key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

FILE = "e2b-seal"


class Keys:
    def __init__(self, data_dir: Path) -> None:
        self._file = data_dir / FILE

    def seal(self, key: str) -> str:
        """Of no key, nothing. Blocks."""
        return self._seal().encrypt(key.encode()).decode() if key else ""

    def open(self, sealed: object) -> str | None:
        """None: there was none, or nobody can read it any more. Blocks."""
        if not isinstance(sealed, str) or not sealed:
            return None
        try:
            return self._seal().decrypt(sealed).decode()
        except InvalidToken:
            return None

    def _seal(self) -> Fernet:
        with contextlib.suppress(FileNotFoundError):
            return Fernet(self._file.read_bytes())
        draft = self._file.with_name(f".{FILE}-{secrets.token_hex(4)}")
        draft.touch(mode=0o600)
        draft.write_bytes(Fernet.generate_key())
        with contextlib.suppress(FileExistsError):
            os.link(draft, self._file)  # two may come here at once
        draft.unlink()
        return Fernet(self._file.read_bytes())
