"""Bytes from the loop to work in a thread, a few pieces ahead of it.

The thread is one of its own: it waits for whoever sends, and must not keep the loop's few threads
waiting with it.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from capsule.providers.cleanup import to_the_end

T = TypeVar("T")
AHEAD = 16  # pieces


class Feed:
    """The thread's end: a source to read from."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.room = asyncio.Semaphore(AHEAD)
        self.whole = False  # what was sent is all there is
        self._held = memoryview(b"")
        self._ended = False

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; b"" at the end. Raises BrokenPipeError if there is no end."""
        while not self._held and not self._ended:
            piece = self._pieces.get()
            self._ended = piece is None
            self._held = memoryview(piece or b"")
            self._loop.call_soon_threadsafe(self.room.release)
        if self._ended and not self.whole:
            raise BrokenPipeError("the sender has stopped")
        part, self._held = self._held[:size], self._held[size:]
        return bytes(part)

    def put(self, piece: bytes | None) -> None:
        self._pieces.put(piece)


async def fed(pieces: AsyncGenerator[bytes, None], work: Callable[[Feed], T]) -> T:
    """What `work` makes of them. It has ended when this returns or raises; what `pieces` raises
    comes first."""
    loop = asyncio.get_running_loop()
    feed = Feed(loop)
    executor = ThreadPoolExecutor(1, thread_name_prefix="feed")
    working = loop.run_in_executor(executor, work, feed)
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if piece and not await _handed_over(feed, piece, working):
                    break
            else:
                feed.whole = True
    finally:
        feed.put(None)
        await to_the_end(_ended(working))
        executor.shutdown(wait=False)
    return working.result()


async def _handed_over(feed: Feed, piece: bytes, working: asyncio.Future[T]) -> bool:
    """False: nobody wants it any more."""
    room: asyncio.Future[Any] = asyncio.ensure_future(feed.room.acquire())
    both: set[asyncio.Future[Any]] = {room, working}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        room.cancel()
    if not working.done():
        feed.put(piece)
    return not working.done()


async def _ended(working: asyncio.Future[T]) -> None:
    await asyncio.wait({working})
    working.exception()  # seen: what `pieces` raised may count more
