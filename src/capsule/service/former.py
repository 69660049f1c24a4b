"""The box that a sandbox had before a reset. Its programs end at once; the rest of it, which takes
an engine longer, is removed while the sandbox is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from capsule.errors import CapsuleError
from capsule.model import Handle
from capsule.providers.contract import Box, Haltable
from capsule.service.tasks import Tasks

log = structlog.get_logger(__name__)

HALT_BUDGET = 1.0
# Removed beside their sandboxes at the same time. Beyond that whoever resets waits for a removal,
# so that boxes do not come quicker than they go.
MOST = 8


@dataclass(frozen=True, slots=True, eq=False)
class Former:
    handle: Handle
    layers: frozenset[str]  # which it has until it is removed
    ended: asyncio.Future[bool]  # whether none of its programs runs any more
    removal: asyncio.Task[bool]  # whether nothing of it is left

    @property
    def removed(self) -> bool:
        done = self.removal.done() and not self.removal.cancelled()
        return done and self.removal.exception() is None and self.removal.result()


class Formers:
    """Tasks are the owner's of `tasks`. What `remove` leaves behind the reaper finds."""

    def __init__(self, tasks: Tasks, remove: Callable[[Box], Coroutine[Any, Any, bool]]) -> None:
        self._tasks = tasks
        self._remove = remove
        self._leaving = 0

    def part(self, box: Box, layers: frozenset[str]) -> Former:
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        removal = self._tasks.spawn(self._part(box, ended), f"part {box.handle.sandbox_id}")
        return Former(box.handle, layers, ended, removal)

    async def _part(self, box: Box, ended: asyncio.Future[bool]) -> bool:
        halted = removed = False
        self._leaving += 1
        try:
            halted = await _halted(box)
            if halted and self._leaving <= MOST:
                ended.set_result(True)
            removed = await self._remove(box)
        finally:
            self._leaving -= 1
            if not ended.done():
                ended.set_result(halted or removed)
        return removed


async def _halted(box: Box) -> bool:
    if not isinstance(box, Haltable):
        return False
    try:
        async with asyncio.timeout(HALT_BUDGET):
            await box.halt()
        return True
    except (CapsuleError, TimeoutError) as error:
        log.info("box not halted", box=box.handle.sandbox_id, reason=str(error))
    except Exception:  # a provider's mistake must not keep it from being removed
        log.exception("box not halted", box=box.handle.sandbox_id)
    return False
