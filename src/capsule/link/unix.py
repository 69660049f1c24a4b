"""A byte stream over a Unix socket, as cheap as asyncio allows.

No transport, no buffer of our own: the kernel's socket buffer is the buffer, so backpressure is
the kernel's too. The socket is watched while somebody waits in `receive`; when data comes and
nobody does, watching stops until somebody does again. An exec of `true` costs one connect, one
send, two reads and one epoll registration.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import AbstractEventLoop, Future

from capsule.errors import UnavailableError

_RETRY = 0.001  # first pause when the listener's queue is full; doubles up to 32 ms


class NobodyListensError(UnavailableError):
    """There is no listener: whoever it was is gone. Other trouble may be the host's own."""


async def connect_unix(path: str, *, timeout: float = 5.0) -> UnixStream:
    """Raises NobodyListensError, and UnavailableError when nobody accepts within `timeout` or this
    process has no file descriptor left."""
    loop = asyncio.get_running_loop()
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as exc:
        raise UnavailableError(f"no socket to reach the agent with: {exc.strerror}") from exc
    try:
        await _connect(sock, path, loop.time() + timeout)
    except BaseException:
        sock.close()
        raise
    return UnixStream(sock, loop)


async def _connect(sock: socket.socket, path: str, deadline: float) -> None:
    loop = asyncio.get_running_loop()
    pause = _RETRY
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            # A full queue is EAGAIN, and unlike with TCP nothing is under way: asyncio's own
            # sock_connect takes it for "in progress" and hands out a socket that is not
            # connected.
            if loop.time() + pause > deadline:
                raise UnavailableError(f"agent accepts no connection: {path}") from None
        except (ConnectionRefusedError, FileNotFoundError) as exc:
            raise NobodyListensError(f"agent is not there: {path}") from exc
        except OSError as exc:
            raise UnavailableError(f"agent cannot be reached: {path}: {exc}") from exc
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.032)


class UnixStream:
    """One reader and one writer at a time. Losing a cancelled `receive` loses no byte."""

    __slots__ = (
        "_chunk", "_error", "_fd", "_loop", "_size", "_sock", "_waiter", "_watched", "_writer",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, loop: AbstractEventLoop) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._watched = False
        self._waiter: Future[None] | None = None
        self._writer: Future[None] | None = None
        self._chunk: bytes | None = None
        self._error: OSError | None = None
        self._size = 65536

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self._chunk is None and self._error is None:
            await self._readable(max_bytes)
        if self._error is not None:
            raise UnavailableError(f"connection to the agent broke: {self._error}") from self._error
        chunk = self._chunk
        if chunk is None:
            raise UnavailableError("connection to the agent is closed")
        if len(chunk) > max_bytes:  # read for a caller that was cancelled, and asked for more
            self._chunk = chunk[max_bytes:]
            return chunk[:max_bytes]
        if chunk:  # b"" stays: the end is the end however often one asks
            self._chunk = None
        return chunk

    async def _readable(self, max_bytes: int) -> None:
        if self._fd < 0:
            raise UnavailableError("connection to the agent is closed")
        if self._waiter is not None:
            raise RuntimeError("two tasks receive from one stream")
        self._size = max_bytes
        # Always through the loop, even if bytes are there: a flood must not keep others from
        # running.
        if not self._watched:
            self._loop.add_reader(self._fd, self._on_readable)
            self._watched = True
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _on_readable(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._unwatch()
            return
        try:
            self._chunk = self._sock.recv(self._size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._error = exc
        if not self._chunk:
            self._unwatch()
        waiter.set_result(None)

    def _unwatch(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._fd)
            self._watched = False

    async def send(self, data: bytes) -> None:
        if self._fd < 0:
            raise UnavailableError("connection to the agent is closed")
        sent = self._send(data)
        if sent < len(data):
            await self._send_rest(memoryview(data)[sent:])

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            raise UnavailableError(f"connection to the agent broke: {exc}") from exc

    async def _send_rest(self, rest: memoryview) -> None:
        if self._writer is not None:
            raise RuntimeError("two tasks send to one stream")
        while rest:
            self._writer = writer = self._loop.create_future()
            self._loop.add_writer(self._fd, _wake, writer)
            try:
                await writer
            finally:
                self._writer = None
                if self._fd >= 0:
                    self._loop.remove_writer(self._fd)
            rest = rest[self._send(rest) :]

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Closing is immediate: `aclose` only has the form that the contract asks for."""
        if self._fd < 0:
            return
        self._unwatch()
        if self._writer is not None:
            self._loop.remove_writer(self._fd)
        self._fd = -1
        self._sock.close()
        self._chunk = None
        for waiter in (self._waiter, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_exception(UnavailableError("connection to the agent is closed"))


def _wake(waiter: Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
