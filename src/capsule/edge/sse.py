"""Server-Sent Events: an exec's output, a folder's changes. They end when the client leaves.

    event: started     {"exec_id", "pid"}              first, when this request started the exec
    event: stdout, stderr or pty
                       {"offset", "data"}              id: OUT-ERR; text, or base64 if asked for;
                                                       at most 64 KiB of output
    event: gap         {"stream", "start", "end"}      id: OUT-ERR; bytes that are no longer kept
    event: exit        as in an exec's result          id: OUT-ERR-end
    event: error       {"code", "message", …}          the stream broke; the exec may go on

`OUT-ERR` are the byte offsets behind the event, so a client that sends the last id it saw as
Last-Event-ID gets what follows it. In text an offset is always the start of a character. `:`
lines are heartbeats. A stream without its last event was cut: the exec goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capsule.edge.errors import encode, told, understand
from capsule.edge.follow import Chunk, Event, Follower
from capsule.edge.text import show
from capsule.edge.views import GapView, StartedView
from capsule.errors import InvalidError
from capsule.link.watch import Change
from capsule.service import LiveExec

HEARTBEAT = 15.0
_END = {"type": "http.response.body", "body": b""}
_ID = re.compile(r"^(\d{1,19})-(\d{1,19})(-end)?$")


def parse_event_id(text: str) -> tuple[int, int, bool]:
    """The two offsets, and whether the exit was seen already."""
    if not (match := _ID.match(text)):
        raise InvalidError(
            f"Last-Event-ID: not one of ours: {text[:60]!r}",
            hint="send back the id of the last event you got, as it was",
            field="Last-Event-ID",
        )
    return int(match[1]), int(match[2]), match[3] is not None


def event(name: str, data: Any, *, id: str | None = None) -> bytes:
    # JSON has no raw line breaks, so one `data:` line always suffices.
    head = f"id: {id}\nevent: {name}\n" if id else f"event: {name}\n"
    return head.encode("ascii") + b"data: " + encode(data) + b"\n\n"


async def exec_events(
    stream: LiveExec, *, encoding: str, stdout: int = 0, stderr: int = 0, started: bool = False
) -> AsyncGenerator[bytes, None]:
    follower = Follower(stream, text=encoding == "text", stdout=stdout, stderr=stderr)
    async with stream:
        try:
            if started:
                yield event("started", StartedView(exec_id=stream.exec_id, pid=stream.pid))
            async for item in follower:
                yield _format(item, follower.offsets)
        except Exception as error:  # the response has begun: the stream itself must say it
            yield event("error", told(understand(error)))


def _format(item: Event, offsets: tuple[int, int]) -> bytes:
    id = f"{offsets[0]}-{offsets[1]}"
    if isinstance(item, Chunk):
        data = item.data if isinstance(item.data, str) else show(item.data, "base64")
        return event(item.stream, {"offset": item.offset, "data": data}, id=id)
    if isinstance(item, GapView):
        return event("gap", item, id=id)
    return event("exit", item, id=f"{id}-end")


async def change_events(
    changes: AsyncIterator[Change], stack: contextlib.AsyncExitStack
) -> AsyncGenerator[bytes, None]:
    """`stack` holds the watch open."""
    try:
        async with stack:
            async for change in changes:
                data = {"change": change.change, "path": change.path, "is_dir": change.dir}
                yield event("change", data)
    except Exception as error:  # as above
        yield event("error", told(understand(error)))


class Held(Protocol):
    """What an answer reads from: closed with it, also when not a byte of it was asked for, and
    closed twice without harm.
    """

    async def aclose(self) -> None: ...


class EventStream(Response):
    """Sends what `source` yields until it ends, the client leaves, or `until` is set."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        held: Held,
        until: asyncio.Event | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._held = held
        self._until = until or asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leave: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(until_gone(receive)),
            asyncio.ensure_future(self._until.wait()),
        }
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                await self._pump(leave, send)
            except asyncio.CancelledError:  # the server stops
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0):  # at once, or not at all
                        await send(_END)
                raise
            await send(_END)
        finally:
            await cancel_all(leave)
            await self._source.aclose()
            await self._held.aclose()

    async def _pump(self, leave: set[asyncio.Future[Any]], send: Send) -> None:
        step: asyncio.Future[bytes] = asyncio.ensure_future(anext(self._source))
        try:
            while True:
                await asyncio.wait(
                    {step, *leave}, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED
                )
                if any(reason.done() for reason in leave):
                    return
                if not step.done():
                    await _send_part(send, b":\n\n")
                    continue
                part = step.result()
                step = asyncio.ensure_future(anext(self._source))
                await _send_part(send, part)
        except StopAsyncIteration:
            return
        finally:
            await cancel_all({step})


async def cancel_all(tasks: set[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def until_gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
