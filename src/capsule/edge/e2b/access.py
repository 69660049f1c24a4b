"""What opens a sandbox to who has no key: a token that only those know who made it or connected to
it.

It is made from the sandbox's id with a secret of the server, so nothing is kept per sandbox, and it
stays the same across restarts and connects.
"""

from __future__ import annotations

import hmac
import os
import secrets
from functools import lru_cache
from pathlib import Path

_SECRET = 32
_NAME = "e2b.secret"
REMEMBERED = 4096  # tokens


class Access:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.token = lru_cache(maxsize=REMEMBERED)(self._token)

    @classmethod
    def open(cls, data_dir: Path) -> Access:
        """With the secret of this folder, which is made the first time. Blocks."""
        path = data_dir / _NAME
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            found = b""
        if len(found) != _SECRET:
            found = secrets.token_bytes(_SECRET)
            _write(path, found)
        return cls(found)

    def _token(self, id: str) -> str:
        """What envd asks for."""
        return "ea_" + self._of("envd", id)

    def traffic_token(self, id: str) -> str:
        """What the ports of a sandbox that is not public ask for."""
        return "ta_" + self._of("traffic", id)

    def volume_token(self, id: str) -> str:
        """What the content of a volume is read and written with."""
        return "va_" + self._of("volume", id)

    def upload_token(self, what: str) -> str:
        """What a place to send files to is signed with."""
        return self._of("upload", what)

    def opens_ports(self, id: str, token: str) -> bool:
        return same(token, self.traffic_token(id))

    def is_one(self, id: str, value: str) -> bool:
        return value.startswith(("ea_", "ta_")) and (
            same(value, self.token(id)) or self.opens_ports(id, value)
        )

    def _of(self, kind: str, id: str) -> str:
        return hmac.digest(self._secret, f"{kind}:{id}".encode(), "sha256").hex()[:40]


def same(one: str, other: str) -> bool:
    """In a time that tells nothing."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(path)
