"""The graceful stop: what begins is refused, what runs may end, what does not end in time is
cut.

`Gate` wraps the whole app. `close()` refuses new work and tells the endless streams (terminals,
watches) to end; `idle()` waits for the rest; `cut()` ends what is still there: a request that has
not been answered gets a 503, an answer that has begun loses its connection. Event streams end by
themselves (`sse`).
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from capsule.edge.errors import Answer, send_error
from capsule.errors import UnavailableError

# In the scope, from our server: awaited, it cuts the connection.
ABORT = "capsule.abort"


class Gate:
    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self._requests: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cutting = False

    def admit(self) -> None:
        """Called before anything is begun that takes time. Raises UnavailableError while
        stopping.
        """
        if self.closing.is_set():
            raise stopping()

    def close(self) -> None:
        self.closing.set()

    async def idle(self) -> None:
        await self._idle.wait()

    def cut(self) -> int:
        """How many requests and sockets had to be cut."""
        self._cutting = True
        for task in self._requests:
            task.cancel()
        return len(self._requests)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            task = asyncio.current_task()
            assert task is not None  # ASGI servers run apps in tasks
            self._requests.add(task)
            self._idle.clear()
            try:
                await self._run(app, scope, receive, send, task)
            finally:
                self._requests.discard(task)
                if not self._requests:
                    self._idle.set()

        return gated

    async def _run(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, task: asyncio.Task[object]
    ) -> None:
        answer = Answer(send)
        try:
            await app(scope, receive, answer)
        except asyncio.CancelledError:
            if not self._cutting:
                raise
            task.uncancel()
            if not answer.begun:
                await send_error(scope, receive, send, stopping())
            elif not answer.over:
                await cut(scope)


async def cut(scope: Scope) -> None:
    """Let the client see that this is not the end: nothing else tells it."""
    if (abort := scope.get(ABORT)) is not None:
        await abort()
        await asyncio.sleep(0)  # until the server has noticed


def stopping() -> UnavailableError:
    return UnavailableError(
        "the server is stopping",
        hint="try again in a moment; sandboxes and execs outlive a restart",
    )
