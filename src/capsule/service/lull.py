"""A while in which nothing is launched ahead, because it would take the machine from somebody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from capsule.service.clock import Clock

LONGEST = 1.0  # seconds; many who follow each other closely must not keep shelves empty


class Lull:
    """`over` is called whenever it ends for somebody."""

    def __init__(self, clock: Clock, over: Callable[[], None]) -> None:
        self._clock = clock
        self._over = over
        self._wanted = 0  # by so many
        self._until = 0.0

    @contextmanager
    def kept(self) -> Iterator[None]:
        if not self._wanted:
            self._until = self._clock.monotonic() + LONGEST
        self._wanted += 1
        try:
            yield
        finally:
            self._wanted -= 1
            self._over()

    def holds(self) -> bool:
        return self._wanted > 0 and self._clock.monotonic() < self._until
