"""Calls of envd: a shape that the request must have, and a function that answers it.

`unary` has one answer. `streaming` answers with a row of events, and whatever goes wrong is in the
last frame of it, with status 200; `Events` is such an answer while it is sent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capsule.edge.body import chunks, read_body
from capsule.edge.drain import ABORT, cut
from capsule.edge.e2b.connect import (
    STREAM,
    UNARY,
    RpcError,
    decode,
    end,
    envelope,
    envelopes,
)
from capsule.edge.e2b.guests import Guest
from capsule.edge.errors import encode, understand
from capsule.edge.sse import Held, cancel_all, until_gone
from capsule.errors import CapsuleError, GoneError

T = TypeVar("T")
Call = Callable[[Guest, Request], Awaitable[Response]]
Source = AsyncGenerator[bytes, None]


class Opened(NamedTuple):
    """A stream that is about to be sent, and what is to be closed with it, also when not a byte of
    it was asked for."""

    source: Source
    held: Held


CUT = "the connection to the sandbox ended before the stream completed"
LATE = "the stream's time is over"
USUAL_PING = 90.0
_MAX_TIMEOUT = 10 * 365 * 86400.0


def json(body: object, status: int = 200) -> Response:
    return Response(encode(body), status_code=status, media_type="application/json")


def unary(shape: type[T], answer: Callable[[Guest, T, Request], Awaitable[Any]]) -> Call:
    async def call(guest: Guest, request: Request) -> Response:
        if not _is(request, UNARY):
            return other_type(UNARY)
        message = decode(await read_body(request.receive), shape)
        return json(await answer(guest, message, request))

    return call


def streaming(
    shape: type[T],
    answer: Callable[[Guest, T, Request], Awaitable[Opened]],
    ping: dict[str, Any],
    *,
    ends: bool = True,
    until: asyncio.Event | None = None,
) -> Call:
    """`answer` is awaited first: what it raises is all that the stream says. `ends`: the request's
    time ends the stream; else that is for `answer` to see to."""

    async def call(guest: Guest, request: Request) -> Response:
        if not is_stream(request):
            return other_type(STREAM)
        try:
            message = decode(await _only_message(request), shape)
            within = timeout_of(request)
            opened = await answer(guest, message, request)
        except CapsuleError as error:
            if isinstance(error, GoneError):
                raise
            return refusal(RpcError.of(understand(error)))
        except RpcError as error:
            return refusal(error)
        return Events(
            opened,
            envelope(ping),
            every=ping_of(request),
            within=within if ends else None,
            until=until,
            lives=guest.lives,
        )

    return call


def refusal(error: RpcError) -> Response:
    """Of a stream before its first event."""
    return Response(end(error), media_type=STREAM.decode())


class Last(bytes):
    """The end of a stream. An event may be in it, too: then both leave in one write."""


class Severed(Last):
    """The end of a stream whose sandbox is gone. The connection is cut instead, where that can be:
    then every SDK asks whether the sandbox lives, and says that it does not.
    """


async def told(source: Source, lives: Callable[[], bool]) -> Source:
    """What `source` yields, and how it ended."""
    try:
        async for part in source:
            yield part
            if isinstance(part, Last):
                return
    except RpcError as error:
        yield Last(end(error))
    except Exception as error:  # the answer has begun: the stream itself must say it
        known = understand(error)
        if _is_over(known, lives):
            yield Severed(end(RpcError("unavailable", CUT)))
        else:
            yield Last(end(RpcError.of(known)))
    else:
        yield Last(end())


def _is_over(error: CapsuleError, lives: Callable[[], bool]) -> bool:
    """Whether the sandbox is, which was neither reset nor out of reach for a while."""
    if isinstance(error, GoneError):
        return not error.details.get("reset")
    return error.code == "unavailable" and not lives()


async def _only_message(request: Request) -> bytes:
    found = [message async for message in envelopes(chunks(request.receive))]
    if len(found) != 1:
        raise RpcError("invalid_argument", f"{len(found)} messages, must be one")
    return found[0]


class Events(Response):
    """Sends what `source` yields until it ends, the client leaves, or `until` is set; after `every`
    seconds without anything, a ping. At most one event waits for a slow client.
    """

    def __init__(
        self,
        opened: Opened,
        ping: bytes,
        *,
        every: float,
        within: float | None = None,
        until: asyncio.Event | None = None,
        lives: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(media_type=STREAM.decode())
        del self.headers["content-length"]
        self._source = told(opened.source, lives)
        self._opened = opened
        self._ping = ping
        self._every = every
        self._within = within
        self._until = until

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leave: set[asyncio.Future[Any]] = {asyncio.ensure_future(until_gone(receive))}
        if self._until is not None:
            leave.add(asyncio.ensure_future(self._until.wait()))
        try:
            first = await anext(self._source)  # which is there at once, and leaves with the head
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            if not await _send_part(scope, send, first):
                await self._pump(leave, scope, send)
        finally:
            await cancel_all(leave)
            await self._source.aclose()
            await self._opened.source.aclose()
            await self._opened.held.aclose()

    async def _pump(self, leave: set[asyncio.Future[Any]], scope: Scope, send: Send) -> None:
        loop = asyncio.get_running_loop()
        over = math.inf if self._within is None else loop.time() + self._within
        step: asyncio.Future[bytes] = asyncio.ensure_future(anext(self._source))
        try:
            while True:
                patience = min(self._every, over - loop.time())
                await asyncio.wait(
                    {step, *leave}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if any(reason.done() for reason in leave):
                    part: bytes = Last(end(RpcError("unavailable", CUT)))
                elif step.done():
                    part = step.result()
                    if not isinstance(part, Last):
                        step = asyncio.ensure_future(anext(self._source))
                elif loop.time() < over:
                    part = self._ping
                else:
                    part = Last(end(RpcError("deadline_exceeded", LATE)))
                if await _send_part(scope, send, part):
                    return
        finally:
            await cancel_all({step})


async def _send_part(scope: Scope, send: Send, part: bytes) -> bool:
    """Whether it was the last."""
    if isinstance(part, Severed) and ABORT in scope:
        await cut(scope)
        return True
    is_last = isinstance(part, Last)
    await send({"type": "http.response.body", "body": part, "more_body": not is_last})
    return is_last


def timeout_of(request: Request) -> float | None:
    """Seconds that the client gives the call; None: as long as it takes."""
    text = request.headers.get("connect-timeout-ms", "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise RpcError("invalid_argument", f"connect-timeout-ms: {text[:40]!r} is no number")
    return min(int(text) / 1000, _MAX_TIMEOUT)


def ping_of(request: Request) -> float:
    text = request.headers.get("keepalive-ping-interval", "")
    return min(max(float(text), 0.1), 3600.0) if text.isdecimal() and text != "0" else USUAL_PING


def _is(request: Request, kind: bytes) -> bool:
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return sent == kind.decode()


def is_stream(request: Request) -> bool:
    return _is(request, STREAM)


def other_type(kind: bytes) -> Response:
    return Response(status_code=415, headers={"accept-post": kind.decode()})
