"""What a relay says where only text comes out: lines of base64 (spec/relay.md)."""

from __future__ import annotations

import binascii
from binascii import a2b_base64

from capsule.link.protocol import ProtocolError

LONGEST = 4 * 1024 * 1024


class Lines:
    def __init__(self) -> None:
        self._begun: list[str] = []
        self._size = 0

    def feed(self, text: str) -> bytes:
        """What it completes. Raises ProtocolError."""
        *whole, rest = text.split("\n")
        if whole:
            whole[0] = "".join(self._begun) + whole[0]
            self._begun.clear()
            self._size = 0
        self._begun.append(rest)
        self._size += len(rest)
        if self._size > LONGEST:
            raise ProtocolError(f"relay sent a line of {self._size} bytes, limit {LONGEST}")
        return b"".join(_decoded(line) for line in whole)


def _decoded(line: str) -> bytes:
    try:
        return a2b_base64(line, strict_mode=True)
    except (binascii.Error, ValueError):
        raise ProtocolError(f"the relay did not start, but said: {line[:200]!r}") from None
