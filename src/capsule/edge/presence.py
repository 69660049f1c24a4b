"""Work that ends when its client leaves: a build that nobody waits for is not worth its while."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.types import Receive

from capsule.edge.errors import HttpError
from capsule.edge.sse import until_gone

T = TypeVar("T")

LOOK_AFTER = 0.1  # seconds that what is mostly quick may take before its client is looked for

# Whose request is being answered, for verbs, which see nothing of it but what it asks for.
client: ContextVar[Receive | None] = ContextVar("client", default=None)


async def while_there(
    work: Coroutine[Any, Any, T], receive: Receive | None = None, *, after: float = 0.0
) -> T:
    """What `work` returns or raises; it is cancelled when the client leaves, whose body has been
    read. Nobody looks for the client in the first seconds, `after`."""
    receive = receive or client.get()
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    watching: list[asyncio.Future[Any]] = []
    try:
        if after:
            await asyncio.wait({task}, timeout=after)
        if receive and not task.done():
            watching.append(asyncio.ensure_future(until_gone(receive)))
        await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(400, "invalid", "the client left before the end of its request")
        result: T = task.result()
        return result
    finally:
        for each in (task, *watching):
            each.cancel()
        await asyncio.wait({task, *watching})
