"""Sandboxes made together: all of them run, or none does, also after a kill of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from capsule.errors import UnavailableError
from capsule.service.entry import Entry

Save = Callable[[Sequence[Entry]], Awaitable[None]]


class Together:
    """Until the last of them has a box, each is recorded as `creating`, which adoption ends; then
    `save` records all as running with one write."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ready: list[Entry] = []
        self._settled = asyncio.Event()
        self._failed = False

    async def join(self, entry: Entry, save: Save) -> None:
        """Returns when all have joined and are recorded. Raises UnavailableError after `fail`, and
        what `save` raises."""
        self._ready.append(entry)
        if len(self._ready) == self._count:
            await save(self._ready)
            self._settled.set()
        await self._settled.wait()
        if self._failed:
            raise UnavailableError(f"sandbox {entry.id}: another of its fork could not be created")

    def fail(self) -> None:
        """One of them will not join."""
        self._failed = True
        self._settled.set()
