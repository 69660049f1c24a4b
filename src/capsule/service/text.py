"""Bytes to text without ever splitting a character."""

from __future__ import annotations

import codecs


class Utf8Decoder:
    """Decodes one stream, chunk by chunk.

    A character cut at the edge of a chunk waits for its rest (at most 3 bytes are held back); bytes
    that can never become UTF-8 turn into U+FFFD, as decoding the whole with "replace" would do.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left when the stream has ended: a character that was never completed."""
        return self._decoder.decode(b"", final=True)

    @property
    def pending(self) -> int:
        """Bytes held back. An offset to resume from is this much smaller than the bytes fed."""
        return len(self._decoder.getstate()[0])
