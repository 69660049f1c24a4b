"""Output at byte offsets, read as whole characters.

A chunk may end in the middle of a UTF-8 character. `TextCut` holds those bytes (three at most)
back until the rest comes, and its `offset` never counts them: whoever resumes there starts at a
character's first byte.
"""

from __future__ import annotations

import base64

from capsule.service.text import Utf8Decoder


class TextCut:
    def __init__(self, offset: int = 0) -> None:
        self._decoder = Utf8Decoder()
        self.offset = offset

    @property
    def held(self) -> int:
        """Bytes held back: the start of a character."""
        return self._decoder.pending

    def feed(self, data: bytes) -> str:
        end = self.offset + self.held + len(data)
        text = self._decoder.feed(data)
        self.offset = end - self.held
        return text

    def take(self, data: bytes) -> bytes:
        """Instead of `feed`, for those who want bytes."""
        self.offset += len(data)
        return data

    def flush(self) -> str:
        """The end: what was held back is no character, and becomes U+FFFD."""
        self.offset += self.held
        return self._decoder.finish()

    def jump(self, offset: int) -> None:
        """Go on after bytes that are gone."""
        self._decoder = Utf8Decoder()
        self.offset = offset


def show(data: bytes, encoding: str) -> str:
    """A program's bytes in a JSON string: as text (what is not UTF-8 becomes U+FFFD) or as
    base64.
    """
    if encoding == "base64":
        return base64.b64encode(data).decode("ascii")
    return data.decode("utf-8", "replace")


def is_text(name: str) -> bool:
    """False for a name with bytes that are not UTF-8; the link gives those as surrogate escapes."""
    if name.isascii():
        return True
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
