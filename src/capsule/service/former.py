"""The box that a sandbox had before a reset. Its programs end at once; the rest of it, which takes
an engine longer, is removed while the sandbox is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from capsule.errors import CapsuleError
from capsule.providers.contract import Box, Haltable
from capsule.service.tasks import Tasks

log = structlog.get_logger(__name__)

HALT_BUDGET = 1.0
# Removed beside their sandboxes at the same time. Beyond that whoever resets waits for a removal,
# so that boxes do not come quicker than they go.
MOST = 8


@dataclass(frozen=True, slots=True, eq=False)
class Former:
    ended: asyncio.Future[bool]  # whether none of its programs runs any more
    removal: asyncio.Task[bool]  # whether nothing of it is left; otherwise the reaper looks
    layers: frozenset[str]  # which it has until then


class Formers:
    """`remove` never raises; its tasks are the owner's of `tasks`."""

    def __init__(self, tasks: Tasks, remove: Callable[[Box], Coroutine[Any, Any, bool]]) -> None:
        self._tasks = tasks
        self._remove = remove
        self._leaving = 0

    def part(self, box: Box, layers: frozenset[str]) -> Former:
        ended = asyncio.get_running_loop().create_future()
        work = self._part(box, ended)
        return Former(ended, self._tasks.spawn(work, f"part {box.handle.sandbox_id}"), layers)

    async def _part(self, box: Box, ended: asyncio.Future[bool]) -> bool:
        removed = False
        self._leaving += 1
        try:
            if await _halted(box) and self._leaving <= MOST:
                ended.set_result(True)
            removed = await self._remove(box)
        finally:
            self._leaving -= 1
            if not ended.done():
                ended.set_result(removed)
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
        return False
