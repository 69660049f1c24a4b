"""Connections that are made before they are asked for.

To connect wakes the agent, which costs as much as the rest of what an exec takes in Python. Whoever
has used a sandbox a moment ago will likely use it again: the next connection is made while the
agent is busy with this one. One that waits for long is closed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from capsule.link.unix import UnixStream, connect_unix

AGAIN = 1.0  # seconds: used twice within these, it is in use
IDLE = 2.0  # seconds that a connection waits for whoever comes next


class Ahead:
    """The way to one agent. `close` is for its end; the way is open afterwards all the same."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ready: socket.socket | None = None
        self._used = -AGAIN
        self._timer: asyncio.TimerHandle | None = None

    async def connect(self) -> UnixStream:
        """As `connect_unix`."""
        loop = asyncio.get_running_loop()
        before, self._used = self._used, loop.time()
        ready, self._ready = self._ready, None
        if self._used - before < AGAIN:
            loop.call_soon(self._prepare, loop)
        return await self._use(ready)

    def expect(self) -> None:
        """Somebody will connect in a moment. Nothing is lost if nobody does."""
        loop = asyncio.get_running_loop()
        self._used = loop.time()
        self._prepare(loop)

    async def connect_last(self) -> UnixStream:
        """As `connect`, for the end: nobody will come after this, so none is made ahead."""
        ready, self._ready = self._ready, None
        self.close()
        return await self._use(ready)

    async def _use(self, ready: socket.socket | None) -> UnixStream:
        if ready is not None:
            if _listens(ready):
                return UnixStream(ready, asyncio.get_running_loop())
            ready.close()
        return await connect_unix(self._path)

    def close(self) -> None:
        self._used = -AGAIN
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ready is not None:
            self._ready.close()
            self._ready = None

    __del__ = close

    def _prepare(self, loop: asyncio.AbstractEventLoop) -> None:
        """Whatever stands in the way is for whoever asks to meet."""
        if self._ready is not None or self._used < 0:
            return
        with contextlib.suppress(OSError):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                sock.connect(self._path)
            except OSError:
                sock.close()
                raise
            self._ready = sock
            if self._timer is None:
                self._timer = loop.call_later(IDLE, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._ready is None:
            return
        left = self._used + IDLE - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._look, loop)
        else:
            self._ready.close()
            self._ready = None


def _listens(sock: socket.socket) -> bool:
    """An agent says nothing before it is asked: whatever there is to read is its end."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
