"""The stdin and stdout of a program behind the Engine: what comes is stdout and stderr in turn."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from capsule.errors import UnavailableError
from capsule.link.protocol import ProtocolError
from capsule.link.stream import ByteStream


class Piece(NamedTuple):
    stream: int  # 1: stdout, 2: stderr, 3: the Engine's own complaint
    data: bytes


class StreamDecoder:
    """Takes apart what the Engine sends for a program without a terminal, without any I/O.

    Each of its frames has a header (a number, three zeros, a length) and is handed on in whatever
    pieces it arrives: nothing but a header is ever kept.
    """

    _HEADER = Struct(">B3sI")

    def __init__(self) -> None:
        self._head = b""
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> list[Piece]:
        """Raises ProtocolError when it is no such stream."""
        pieces = []
        at = 0
        while at < len(data):
            if not self._left:
                need = self._HEADER.size - len(self._head)
                self._head += data[at : at + need]
                at += need
                if len(self._head) == self._HEADER.size:
                    self._begin(*self._HEADER.unpack(self._head))
                continue
            piece = data[at : at + self._left]
            self._left -= len(piece)
            at += len(piece)
            pieces.append(Piece(self._stream, piece))
        return pieces

    def _begin(self, stream: int, zeros: bytes, size: int) -> None:
        if stream > 3 or any(zeros):
            raise ProtocolError(f"the Engine sent no frame of a stream: {self._head!r}")
        self._stream, self._left, self._head = stream, size, b""


def demultiplex(raw: ByteStream) -> ByteStream:
    """The stdout of a program behind the Engine, and its stdin the other way.

    What it says on stderr, or the Engine instead of it, is the reason given when it ends.
    """
    return _Stdout(raw)


class _Stdout:
    _COMPLAINT = 1000  # bytes of stderr that are kept

    def __init__(self, raw: ByteStream) -> None:
        self._raw = raw
        self._decoder = StreamDecoder()
        self._buffer = bytearray()
        self._complaint = b""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._buffer:
            try:
                data = await self._raw.receive(max_bytes)
            except UnavailableError as exc:
                self._complain(exc)
                raise
            if not data:
                self._complain(None)
                return b""
            for stream, piece in self._decoder.feed(data):
                if stream < 2:
                    self._buffer += piece
                else:
                    self._complaint = (self._complaint + piece)[: self._COMPLAINT]
        chunk = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        return chunk

    def _complain(self, cause: UnavailableError | None) -> None:
        if self._complaint:
            text = self._complaint.decode("utf-8", "replace").strip()
            raise UnavailableError(f"a program behind the Engine ended: {text}") from cause

    async def send(self, data: bytes) -> None:
        await self._raw.send(data)

    async def aclose(self) -> None:
        await self._raw.aclose()
