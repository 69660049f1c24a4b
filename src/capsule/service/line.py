"""Who launches next: so many at once, the rest in the order they came.

A machine starts boxes fastest a few at a time; a hundred at once only get into each other's way.
Whoever waits may also be given something better than its turn: a box that is ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Wish = TypeVar("Wish")
Gift = TypeVar("Gift")


class Place:
    """A launch's place among those that go on. Leaving it again does nothing."""

    __slots__ = ("_leave",)

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Line(Generic[Wish, Gift]):
    """`idle` is called when a place is free and nobody waits, `returned` with what was given to
    somebody who had left."""

    def __init__(
        self, width: int, *, idle: Callable[[], None], returned: Callable[[Gift], object]
    ) -> None:
        self.width = width
        self.taken = 0
        self._waiting: dict[asyncio.Future[Place | Gift], Wish] = {}
        self._idle = idle
        self._returned = returned

    def waiting(self) -> list[Wish]:
        return list(self._waiting.values())

    def try_take(self) -> Place | None:
        """A place, if one is free and nobody waits for it."""
        return self._take() if self.taken < self.width and not self._waiting else None

    async def wait(self, wish: Wish) -> Place | Gift:
        if (place := self.try_take()) is not None:
            return place
        turn: asyncio.Future[Place | Gift] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = wish
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give_back(turn.result())
            raise
        finally:
            self._waiting.pop(turn, None)

    def offer(self, gift: Gift, suits: Callable[[Wish], bool]) -> bool:
        """Give it to the first who waits and whom it suits. False: there is none."""
        for turn, wish in self._waiting.items():
            if not turn.done() and suits(wish):
                del self._waiting[turn]
                turn.set_result(gift)
                return True
        return False

    def _take(self) -> Place:
        self.taken += 1
        return Place(self._left)

    def _left(self) -> None:
        self.taken -= 1
        while self._waiting:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(self._take())
                return
        self._idle()

    def _give_back(self, given: Place | Gift) -> None:
        if isinstance(given, Place):
            given.leave()
        else:
            self._returned(given)
