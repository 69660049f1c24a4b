"""One at a time, per name: whoever comes meanwhile waits, in order, and not too many of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from capsule.errors import CapacityError
from capsule.settings import brief

MAX_WAITING = 16


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    there: int = 0  # who has it, and who waits


class Turns:
    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}

    @asynccontextmanager
    async def take(self, name: str) -> AsyncIterator[None]:
        """Raises CapacityError."""
        turn = self._turns.setdefault(name, _Turn())
        if turn.there > MAX_WAITING:
            raise CapacityError(
                f"{MAX_WAITING} requests for {brief(name)} wait already",
                hint="send the next one when the last was answered",
                limit=MAX_WAITING,
            )
        turn.there += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.there -= 1
            if not turn.there:
                del self._turns[name]
