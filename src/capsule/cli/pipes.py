"""Our own standard streams, without blocking the event loop and without threads.

A pager that does not read must not keep Ctrl-C or SIGTERM from working, and a thread in read() or
write() could not be called back.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
from collections.abc import AsyncIterator, Callable
from typing import Any

_CHUNK = 64 * 1024


async def write(fd: int, data: bytes) -> None:
    """All of it. Raises BrokenPipeError when the reader has left."""
    # A pipe that is ready has room for PIPE_BUF bytes, so that this much cannot block.
    most = _CHUNK if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF
    view = memoryview(data)
    while view:
        if not _ready(fd):
            loop = asyncio.get_running_loop()
            await _until(loop.add_writer, loop.remove_writer, fd)
        view = view[os.write(fd, view[:most]) :]


def _ready(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


async def read(fd: int) -> AsyncIterator[bytes]:
    """What comes in, up to its end."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        while data := await asyncio.to_thread(os.read, fd, _CHUNK):
            yield data
        return
    loop = asyncio.get_running_loop()
    while True:
        await _until(loop.add_reader, loop.remove_reader, fd)
        if not (data := os.read(fd, _CHUNK)):
            return
        yield data


async def _until(add: Callable[..., Any], remove: Callable[[int], Any], fd: int) -> None:
    """Until `fd` is ready. epoll takes no regular files, nor /dev/null: those never wait."""
    ready = asyncio.get_running_loop().create_future()
    try:
        add(fd, _settle, ready)
    except PermissionError:
        return
    try:
        await ready
    finally:
        remove(fd)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
