"""HTTP/1.1 for calls that are one request and one whole answer, over plain TCP.

httpx spends 0.4 ms on such a call (0.9 with asyncio), as much as the server needs for its share of
an exec; this spends 0.1. Streams, TLS and proxies are httpx's: there its cost does not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import socket
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ._flow import Answer

IDLE = 30.0  # seconds a connection is kept for; servers keep theirs longer
MOST_IDLE = 64
LARGEST_HEAD = 64 * 1024
_PIECE = 256 * 1024
_DIGITS = re.compile(rb"[0-9]{1,18}")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}")


class Origin(NamedTuple):
    host: str
    port: int
    options: list[tuple[int, int, int]]  # of its sockets


class BrokenAnswer(OSError):
    """What came is not HTTP, or not all of it."""


def encode(method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a line break in a header")
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    return head.encode("latin-1") + body


class Parser:
    """One answer, sans I/O: `feed` what comes, b"" for the end, until it is True."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._length = 0
        self._body: list[bytes] = []

    @property
    def answer(self) -> Answer:
        assert self._head is not None
        status, headers = self._head
        return Answer(status, headers, b"".join(self._body))

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request."""
        assert self._head is not None
        headers = self._head[1]
        ends = "content-length" not in headers and "transfer-encoding" not in headers
        return not self._buffer and not ends and headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bool:
        self._buffer += data
        while self._head is None:
            if not self._take_head(ended=not data):
                return False
        headers = self._head[1]
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return self._take_chunks(ended=not data)
        if "content-length" not in headers:
            return self._take_rest(ended=not data)
        return self._take_counted(self._length, ended=not data)

    def _take_head(self, *, ended: bool) -> bool:
        head, found, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not found:
            if ended or len(head) > LARGEST_HEAD:
                raise BrokenAnswer("the answer broke off" if ended else "endless headers")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest_of_first = first.partition(" ")
        if not version.startswith("HTTP/1.") or not re.match(r"[1-5][0-9]{2}\b", rest_of_first):
            raise BrokenAnswer("not an HTTP server")
        status = int(rest_of_first[:3])
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): text.strip() for name, _, text in pairs}
        self._buffer = bytearray(rest)
        if status >= 200:  # not a mere "100 Continue"
            if status in (204, 304):
                headers["content-length"] = "0"
            length = headers.get("content-length", "0").encode("latin-1")
            if not _DIGITS.fullmatch(length):
                raise BrokenAnswer("a length that is no number")
            self._length = int(length)
            self._head = (status, headers)
        return True

    def _take_counted(self, length: int, *, ended: bool) -> bool:
        if len(self._buffer) < length:
            if ended:
                raise BrokenAnswer("the answer broke off")
            return False
        self._body = [bytes(self._buffer[:length])]
        del self._buffer[:length]
        return True

    def _take_chunks(self, *, ended: bool) -> bool:
        while (end := self._buffer.find(b"\r\n")) >= 0:
            digits = bytes(self._buffer[:end]).partition(b";")[0].strip()
            if not _HEX.fullmatch(digits):
                raise BrokenAnswer("a chunk without a size")
            size = int(digits, 16)
            if len(self._buffer) < end + 2 + size + 2:
                break
            self._body.append(bytes(self._buffer[end + 2 : end + 2 + size]))
            del self._buffer[: end + 2 + size + 2]
            if size == 0:
                return True
        if ended:
            raise BrokenAnswer("the answer broke off")
        return False

    def _take_rest(self, *, ended: bool) -> bool:
        if ended:
            self._body = [bytes(self._buffer)]
            self._buffer.clear()
        return ended


class Lines:
    """Connections to one server, kept for the next call. Safe to share between threads."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._idle: list[tuple[socket.socket, float]] = []
        self._owner = os.getpid()
        self._closed = False

    def take(self, timeout: float) -> socket.socket:
        """A connection that is open, as far as one can know."""
        if self._owner != os.getpid():
            self._forget()
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                line, since = self._idle.pop()
                if time.monotonic() - since < IDLE and not _readable(line):
                    return line
                line.close()
        line = socket.create_connection((self._origin.host, self._origin.port), timeout)
        for option in [*self._origin.options, (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]:
            line.setsockopt(*option)
        return line

    def exchange(self, line: socket.socket, request: bytes, timeout: float | None) -> Answer:
        """`timeout` is for each piece: what is large may take its time, as long as it moves."""
        parser = Parser()
        try:
            line.settimeout(timeout)
            for piece in _pieces(request):
                line.sendall(piece)
            while not parser.feed(line.recv(_PIECE)):
                pass
        except BaseException:
            line.close()
            raise
        if parser.reusable and len(self._idle) < MOST_IDLE:
            self._idle.append((line, time.monotonic()))
        else:
            line.close()
        if self._closed:  # meanwhile, by another thread
            self.close()
        return parser.answer

    def _forget(self) -> None:
        """After a fork: two processes on one connection would read each other's answers."""
        idle, self._idle, self._owner = self._idle, [], os.getpid()
        for line, _ in idle:
            line.close()  # here only; the parent's stays open

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(IndexError):  # two threads may close it at once
            while self._idle:
                self._idle.pop()[0].close()


def _pieces(request: bytes) -> Iterator[memoryview]:
    view = memoryview(request)
    for start in range(0, len(view), _PIECE):
        yield view[start : start + _PIECE]


def _readable(line: socket.socket) -> bool:
    """An idle connection has nothing to say but that it was closed."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(0))


class AsyncLine(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    loop: asyncio.AbstractEventLoop
    since: float

    @property
    def usable(self) -> bool:
        fresh = time.monotonic() - self.since < IDLE
        ours = self.loop is asyncio.get_running_loop()
        return fresh and ours and not self.reader.at_eof() and not self.writer.is_closing()


class AsyncLines:
    """The same for asyncio."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._idle: list[AsyncLine] = []
        self._closed = False

    async def take(self, timeout: float) -> AsyncLine:
        while self._idle:
            line = self._idle.pop()
            if line.usable:
                return line
            with contextlib.suppress(RuntimeError):  # its loop is closed, and so is the connection
                line.writer.close()
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(self._origin.host, self._origin.port)
        sock = writer.get_extra_info("socket")
        for option in self._origin.options:
            sock.setsockopt(*option)
        return AsyncLine(reader, writer, asyncio.get_running_loop(), 0.0)

    async def exchange(self, line: AsyncLine, request: bytes, timeout: float | None) -> Answer:
        parser = Parser()
        try:
            for piece in _pieces(request):
                async with asyncio.timeout(timeout):
                    line.writer.write(piece)
                    await line.writer.drain()
            done = False
            while not done:
                async with asyncio.timeout(timeout):
                    done = parser.feed(await line.reader.read(_PIECE))
        except BaseException:
            line.writer.close()
            raise
        if parser.reusable and len(self._idle) < MOST_IDLE and not self._closed:
            self._idle.append(line._replace(since=time.monotonic()))
        else:
            line.writer.close()
        return parser.answer

    async def aclose(self) -> None:
        self._closed = True
        while self._idle:
            line = self._idle.pop()
            line.writer.close()
            with contextlib.suppress(OSError, RuntimeError):  # it broke, or its loop is gone
                await line.writer.wait_closed()
