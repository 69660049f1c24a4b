"""One request to a program in a sandbox, and its answer, both as streams.

    carry ─┬─ upload    the request's body as it comes; then waits for the client to leave
           ├─ download  the answer as it comes; its end is the end of all
           └─ stopping  the server stops: a stream of events would never end

Each connection to the program is for one request. Nothing of a body is kept on the way: whoever
does not take the next piece holds up whoever sends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import h11
from starlette.types import Receive, Scope, Send

from capsule.edge.ports import pages
from capsule.edge.ports.headers import outwards
from capsule.edge.sockets import Left, race
from capsule.errors import UnavailableError
from capsule.link.stream import ByteStream

MAX_HEAD = 64 * 1024
MAX_STATUS = 599
ANSWER_PATIENCE = 300.0  # seconds until the answer begins
PIECE_PATIENCE = 3600.0  # seconds between two pieces of it; server-sent events may take their time
TAKE_PATIENCE = 600.0  # seconds in which the program takes a piece of the request

EVENTS = b"text/event-stream"
CLOSED = "closed the connection without an answer"
Headers = list[tuple[bytes, bytes]]


class Cut(Exception):
    """The answer has begun, and will have no end."""


async def carry(
    stream: ByteStream,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: Headers,
    closing: asyncio.Event,
) -> None:
    """`headers` are the request's, framing among them. Raises PortError before the answer begins,
    Cut after it; Left when the client goes first.
    """
    exchange = Exchange(stream, headers, scope)
    stopping = exchange.stopping(closing)
    await race(exchange.download(send), exchange.upload(receive), stopping)


class Exchange:
    def __init__(self, stream: ByteStream, headers: Headers, scope: Scope) -> None:
        self._stream = stream
        self._endless = asyncio.Event()  # its answer is a stream of events
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._has_body = any(n in (b"content-length", b"transfer-encoding") for n, _ in headers)
        try:
            self._head = self._http.send(
                h11.Request(
                    method=scope["method"],
                    target=target_of(scope),
                    headers=[*headers, (b"connection", b"close")],
                )
            )
        except h11.LocalProtocolError as error:
            raise pages.bad_request(f"not a request that can be passed on: {error}") from None

    async def upload(self, receive: Receive) -> None:
        """Never returns: raises Left."""
        with contextlib.suppress(UnavailableError):  # it takes no more; its answer says why
            async with contextlib.aclosing(self._pieces(receive)) as pieces:
                async for piece in pieces:
                    await self._give(piece)
        while (await receive())["type"] != "http.disconnect":
            pass
        raise Left

    async def _pieces(self, receive: Receive) -> AsyncGenerator[Any, None]:
        """The request as it goes over the wire."""
        if not self._has_body:
            yield (self._head or b"") + (self._http.send(h11.EndOfMessage()) or b"")
            return
        yield self._head
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Left
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                yield self._http.send(h11.Data(data=body))
        yield self._http.send(h11.EndOfMessage())

    async def _give(self, data: bytes | None) -> None:
        if not data:
            return
        try:
            async with asyncio.timeout(TAKE_PATIENCE):
                await self._stream.send(data)
        except TimeoutError:
            raise pages.silent(TAKE_PATIENCE) from None

    async def download(self, send: Send) -> None:
        start = await self._begin()
        # A length that nothing follows would be taken for an answer cut short.
        bare = start.status_code in (204, 304)
        headers = [h for h in outwards(start.headers) if not (bare and h[0] == b"content-length")]
        if any(n == b"content-type" and v.startswith(EVENTS) for n, v in headers):
            self._endless.set()
        await send({"type": "http.response.start", "status": start.status_code, "headers": headers})
        try:
            while isinstance(event := await self._next(PIECE_PATIENCE), h11.Data):
                body = bytes(event.data)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except (h11.RemoteProtocolError, UnavailableError, TimeoutError) as error:
            raise Cut from error
        if not isinstance(event, h11.EndOfMessage):
            raise Cut
        await send({"type": "http.response.body", "body": b""})

    async def stopping(self, closing: asyncio.Event) -> None:
        await closing.wait()
        await self._endless.wait()
        raise Cut

    async def _begin(self) -> h11.Response:
        try:
            while not isinstance(event := await self._next(ANSWER_PATIENCE), h11.Response):
                if not isinstance(event, h11.InformationalResponse):
                    raise pages.no_answer(CLOSED)
        except h11.RemoteProtocolError as error:
            if self._http.trailing_data == (b"", True):
                raise pages.no_answer(CLOSED) from None
            raise pages.no_answer(f"gave no answer of HTTP: {error}") from None
        except UnavailableError:
            raise pages.no_answer(CLOSED) from None
        except TimeoutError:
            raise pages.silent(ANSWER_PATIENCE) from None
        if event.status_code > MAX_STATUS:
            raise pages.no_answer(f"gave no answer of HTTP: status {event.status_code}")
        return event

    async def _next(self, patience: float) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(patience):
                self._http.receive_data(await self._stream.receive())
        if event is h11.PAUSED:  # it speaks no HTTP from here on, which nobody has asked for
            raise h11.RemoteProtocolError("the program has changed to another protocol")
        return event


def target_of(scope: Scope) -> bytes:
    """The path as the client wrote it."""
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path
