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

# Whose request is being answered. JSON-RPC sets it: its methods see nothing but their params.
client: ContextVar[Receive | None] = ContextVar("client", default=None)


async def while_there(work: Coroutine[Any, Any, T], receive: Receive | None = None) -> T:
    """What `work` returns or raises; it is cancelled when the client leaves, whose body has been
    read."""
    receive = receive or client.get()
    task = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(until_gone(receive))] if receive else []
    try:
        await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(400, "invalid", "the client left before the end of its request")
        return task.result()
    finally:
        for each in (task, *watching):
            each.cancel()
        await asyncio.wait({task, *watching})
