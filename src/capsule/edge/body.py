"""Reading a request's body, bounded in size and in time.

The guard puts a `Meter` in front of every body. It refuses what is over the limit before reading
it, and gives up on a sender that makes no headway. A route that takes uploads lifts the limit
with `lift`; one that knows a better way for large things names it with `advise`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from capsule.edge.errors import HttpError
from capsule.edge.shapes import parse
from capsule.errors import TooLargeError
from capsule.model import MIB
from capsule.service.room import SMALL, Room

PATIENCE = 30.0  # seconds in which at least HEADWAY bytes must come
HEADWAY = 32 * 1024
FORM = b"application/x-www-form-urlencoded"
AT_HAND = 0.05  # seconds in which the rest of a small body that nobody wants may still come
LINGER = 3.0  # seconds, and
LINGER_BYTES = 256 * MIB  # bytes of an unwanted body that are read and thrown away

T = TypeVar("T")


class Meter:
    """An ASGI `receive` that counts. `room` is what bodies share that must be read whole before
    they mean anything.
    """

    def __init__(self, receive: Receive, *, length: int | None, limit: int, room: Room) -> None:
        self.limit: int | None = limit
        self.patience: float | None = PATIENCE
        self.hint = "send large files with PUT /v1/sandboxes/{id}/files/{path}"
        self._receive = receive
        self._length = length
        self._room = room
        self._total = 0
        self._since_reset = 0
        self._deadline: float | None = None
        self.done = length == 0

    async def __call__(self) -> Message:
        if self.done:  # what is left to receive is the client's leaving: no hurry
            return await self._receive()
        self._check(self._length or 0)
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = self._due(loop)
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            text = f"request body too slow: {self._total} bytes, the last of them long ago"
            hint = f"send at least {HEADWAY} bytes every {PATIENCE:g} seconds"
            raise HttpError(408, "invalid", text, hint=hint) from None
        self._count(len(message.get("body", b"")), loop)
        self.done = not message.get("more_body", False)
        return message

    async def make_room(self) -> None:
        """Wait until all of the body may be kept in memory; its sender waits as well."""
        most = self._length if self._length is not None else self.limit or 0
        if most > SMALL:
            await self._room.take(most)
            self._deadline = None

    def _count(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self._total += size
        self._check(self._total)
        self._since_reset += size
        if self._since_reset >= HEADWAY:
            self._since_reset = 0
            self._deadline = self._due(loop)

    def _due(self, loop: asyncio.AbstractEventLoop) -> float | None:
        return None if self.patience is None else loop.time() + self.patience

    def _check(self, size: int) -> None:
        if self.limit is not None and size > self.limit:
            raise TooLargeError(
                f"request body too large: {size} bytes, limit {self.limit}",
                hint=self.hint,
                limit=self.limit,
            )

    async def discard_small(self) -> None:
        """Mostly it came with the head, or right behind it."""
        if self._length is not None and self._length <= SMALL:
            await self.discard(AT_HAND)

    async def discard(self, patience: float) -> None:
        """Read on for a moment and throw it away; see `finishing`."""
        left = LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while left > 0 and not self.done:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    self.done = not message.get("more_body", False)


def finishing(meter: Meter, send: Send) -> Send:
    """A `send` for answers that may come before the end of the request's body.

    Many clients read nothing until they have sent everything, and closing on unread data resets
    the connection: they would never see the answer. So it goes out, a little more is read, and
    only then the connection is closed. One whose small body is here already stays open.
    """

    async def finish(message: Message) -> None:
        if not meter.done and message["type"] == "http.response.start":
            await meter.discard_small()
        if meter.done:
            await send(message)
        elif message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            await send({**message, "headers": headers})
        elif message.get("more_body"):
            await send(message)
        else:
            await send({**message, "more_body": True})
            await meter.discard(LINGER)
            await send({"type": "http.response.body", "body": b""})

    return finish


def lift(request: Request, limit: int) -> None:
    """Let this request's body be as long as `limit` says (0: as the sandbox's disk allows)."""
    if (meter := _meter(request)) is not None:
        meter.limit = limit or None


def advise(request: Request, hint: str) -> None:
    """What to do instead of sending a body that is too large."""
    if (meter := _meter(request)) is not None:
        meter.hint = hint


def unhurried(request: Request) -> None:
    """Let this request's body come whenever it comes, and as much of it as there is."""
    if (meter := _meter(request)) is not None:
        meter.limit = None
        meter.patience = None


def _meter(request: Request) -> Meter | None:
    """None: the request has no body."""
    meter: Meter | None = request.scope.get("capsule.meter")
    return meter


def require_json(scope: Scope, *, plain: bool = False) -> None:
    """A web page may send some types to any site without asking; JSON is not one of them.

    With `plain`, what `curl -d` calls a form may be JSON as well, from whoever is no browser.
    """
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.split(b";")[0].strip().lower()
            if kind == b"application/json" or kind.endswith(b"+json"):
                return
            if plain and kind == FORM and not _from_browser(scope):
                return
            break
    else:
        kind = b""
    raise HttpError(
        415,
        "invalid",
        f"content-type: {kind[:60].decode('latin-1') or 'missing'}, must be application/json",
        hint="send the header 'Content-Type: application/json'",
    )


def _from_browser(scope: Scope) -> bool:
    """Each of these alone tells one; the last also those of long ago."""
    headers = dict(scope["headers"])
    return (
        bool(headers.keys() & {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode"})
        or b"mozilla" in headers.get(b"user-agent", b"").lower()
    )


async def read_body(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return body
    if isinstance(receive, Meter):
        await receive.make_room()
    parts = [body]
    while message.get("more_body"):
        message = await receive()
        _raise_if_gone(message)
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def chunks(receive: Receive) -> AsyncIterator[bytes]:
    """The body as it comes. Raises when the client leaves before its end, so that nothing half
    is kept.
    """
    more = True
    while more:
        message = await receive()
        _raise_if_gone(message)
        more = message.get("more_body", False)
        if body := message.get("body", b""):
            yield body


def _raise_if_gone(message: Message) -> None:
    if message["type"] == "http.disconnect":
        raise HttpError(400, "invalid", "the client left before the end of its request")


_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


async def read_json(request: Request, shape: type[T], *, plain: bool = False) -> T:
    """The body as `shape`; an empty body counts as `{}`. `plain`: see `require_json`."""
    body = await read_body(request.receive)
    if body:
        require_json(request.scope, plain=plain)
    decoder: msgspec.json.Decoder[T] | None = _DECODERS.get(shape)
    if decoder is None:
        decoder = _DECODERS.setdefault(shape, msgspec.json.Decoder(shape))
    return parse(decoder, body or b"{}")
