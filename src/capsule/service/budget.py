"""What all ready boxes together may cost the machine."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from capsule import surroundings
from capsule.service.shelf import Kind, Shelf

log = structlog.get_logger(__name__)


class Budget:
    def __init__(self, limit: int | None, shelves: Mapping[Kind, Shelf]) -> None:
        """In bytes; None: an eighth of the memory that there is, in a container of its own."""
        self.limit = surroundings.usable_memory() // 8 if limit is None else limit
        self._shelves = shelves

    def used(self) -> int:
        return sum(shelf.memory() for shelf in self._shelves.values())

    def affords(self, shelf: Shelf) -> bool:
        """Whether there is room for one more. The first one says what they cost."""
        if shelf.cost is None:
            return not shelf.launching and self.used() < self.limit
        if self.used() + shelf.cost <= self.limit:
            return True
        if not shelf.told and len(shelf.ready) + shelf.launching < max(shelf.least, 1):
            shelf.told = True
            log.warning(
                "pool_memory has no room for as many boxes as are to be ready",
                template=shelf.kind.template,
                min=shelf.least,
                one=shelf.cost,
                used=self.used(),
                limit=self.limit,
            )
        return False
