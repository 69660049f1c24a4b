"""Work that is brought to its end although whoever asked for it was cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

log = structlog.get_logger(__name__)
T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. If we are cancelled, it is awaited all the same."""
    task = asyncio.create_task(work)
    cancelled = await _settled(task)
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # seen: ours is the one that counts
    raise cancelled


async def finish(cleanup: Coroutine[Any, Any, None], what: str, *, budget: float) -> None:
    """`to_the_end` for callers in `finally`, who carry a better error than the cleanup's own.

    Never raises what the cleanup raised. What could not be removed stays in `owned`, and the
    reaper finds it.
    """
    task = asyncio.create_task(asyncio.wait_for(cleanup, budget))
    cancelled = await _settled(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("cleanup failed", what=what, reason=str(error))
    if cancelled is not None:
        raise cancelled


async def _settled(task: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})  # unlike `await task`, does not pass our cancellation on
        except asyncio.CancelledError as exc:
            cancelled = exc
    return cancelled
