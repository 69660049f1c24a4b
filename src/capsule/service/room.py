"""Memory for what is large: how many bytes the server holds for answers and requests at once.

What a program wrote waits in its agent until there is room for it here, so the server's memory
does not follow the number of its clients times the size of their output. Small things need no
room, so they never wait.

Room is taken for a `holding` block, which an edge puts around a whole request: it is given back
when the answer is out, not when it is ready. A block that has taken some already never waits for
more: everybody waiting for everybody would be the end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from capsule.errors import UnavailableError

SMALL = 128 * 1024  # bytes that need no room
PATIENCE = 60.0
_LESS = "follow output and files as streams, or ask for less of them"

_current: ContextVar[Holder | None] = ContextVar("holder", default=None)


class Room:
    """`what` is kept in it, and `hint` is for those it has no place for."""

    def __init__(self, size: int, what: str = "large answer", hint: str = _LESS) -> None:
        self.taken = 0
        self._size = size
        self._what = what
        self._hint = hint
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """In the order of asking; what is larger than the room waits until it is empty.

        Raises UnavailableError after `PATIENCE` seconds: somebody holds it for slow readers.
        """
        holder = _current.get()
        if holder is None or holder.over:  # nobody would give it back
            return
        first = all(room is not self for room, _ in holder.taken)
        if first and (self._queue or not self._fits(size)):
            await self._wait(size)
        else:
            self.taken += size
        holder.note(self, size)

    async def _wait(self, size: int) -> None:
        """On return it is taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (size, turn)
        self._queue.append(place)
        try:
            async with asyncio.timeout(PATIENCE):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            else:
                self._queue.remove(place)
                self._admit()
            if isinstance(error, TimeoutError):
                text = f"no memory for a {self._what} within {PATIENCE:g} seconds"
                raise UnavailableError(text, hint=self._hint) from None
            raise

    def give_back(self, size: int) -> None:
        self.taken -= size
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0][0]):
            size, turn = self._queue.popleft()
            if not turn.done():
                self.taken += size
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self.taken or self.taken + size <= self._size


class Holder:
    """What one `holding` block has taken."""

    __slots__ = ("over", "taken")

    def __init__(self) -> None:
        self.taken: list[tuple[Room, int]] = []
        self.over = False  # a task that outlives the block still knows it

    def note(self, room: Room, size: int) -> None:
        if self.over:
            room.give_back(size)
        else:
            self.taken.append((room, size))


@contextmanager
def holding() -> Iterator[None]:
    """What is taken inside is given back at the end of the outermost block."""
    if _current.get() is not None:
        yield
        return
    holder = Holder()
    token = _current.set(holder)
    try:
        yield
    finally:
        _current.reset(token)
        holder.over = True
        for room, size in holder.taken:
            room.give_back(size)
