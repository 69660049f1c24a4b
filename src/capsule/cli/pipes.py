"""Our own standard streams, without blocking the event loop.

A pager that does not read must not keep Ctrl-C from working.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
from collections.abc import AsyncIterator

_CHUNK = 64 * 1024


async def write(fd: int, data: bytes) -> None:
    """All of it. Raises BrokenPipeError when the reader has left."""
    view = memoryview(data)
    while view:
        # POLLOUT on a pipe promises room for PIPE_BUF bytes, so a small write cannot block.
        if len(view) <= select.PIPE_BUF and _ready(fd, select.POLLOUT):
            view = view[os.write(fd, view) :]
        else:
            view = view[await asyncio.to_thread(os.write, fd, view[:_CHUNK]) :]


def _ready(fd: int, event: int) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(0))


async def read(fd: int) -> AsyncIterator[bytes]:
    """What comes in, up to its end."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        while data := await asyncio.to_thread(os.read, fd, _CHUNK):
            yield data
        return
    # epoll takes no regular files, but all else; a thread in read() could not be called back.
    loop = asyncio.get_running_loop()
    while True:
        ready = loop.create_future()
        try:
            loop.add_reader(fd, _settle, ready)
        except PermissionError:  # /dev/null and its like: never wait
            data = os.read(fd, _CHUNK)
        else:
            try:
                await ready
            finally:
                loop.remove_reader(fd)
            data = os.read(fd, _CHUNK)
        if not data:
            return
        yield data


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
