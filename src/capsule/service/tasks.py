"""Tasks that outlive the call that began them, each with an owner that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from capsule.errors import CapsuleError

log = structlog.get_logger(__name__)
T = TypeVar("T")


class Tasks:
    """What one object has started. `aclose` cancels what is left and waits for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Whoever waits gets the error too; asking for it here keeps asyncio from complaining when
        # nobody waits any more.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, CapsuleError):
            log.error("task failed unexpectedly", task=task.get_name(), exc_info=error)

    async def settle(self, budget: float) -> None:
        """Wait for what runs, for so many seconds at most."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=budget)

    async def aclose(self) -> None:
        while left := set(self._tasks):  # again: what is cancelled may spawn what clears up
            for task in left:
                task.cancel()
            await asyncio.wait(left)


async def outcome(task: asyncio.Task[T]) -> T:
    """What the task returns or raises. Cancelling the wait does not cancel the task."""
    if not task.done():
        await asyncio.wait({task})
    return task.result()
