"""What every WebSocket of ours does alike: errors before and after the handshake, closing, two
directions at once.

guarded ── the handler
            └─ race: out (program → client), inbox.fill (client → inbox), in (inbox → program),
               and whatever else may end it; the first to finish ends the others
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from capsule.edge.errors import encode, invalid_field, one_line, send_error, understand
from capsule.errors import CapacityError, CapsuleError, GoneError
from capsule.settings import brief

T = TypeVar("T")
Headers = Sequence[tuple[bytes, bytes]]

OVER = 1001
MISTAKE = 1008
FAULT = 1011
RESTART = 1012
FULL = 1013
RESTART_REASON = "the server restarts; come back, what runs goes on"
INPUT_PATIENCE = 600.0
_OVERHEAD = 64  # empty messages take room too
_MAX_REASON = 123  # bytes; the frame has no room for more


class Left(Exception):
    """The client has gone; `code` and `reason` are how it closed, if it did."""

    def __init__(self, code: int = 1006, reason: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.reason = reason


class Socket:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.accepted = False
        self._receive = receive
        self._send = send

    def offers(self, protocol: str) -> bool:
        return protocol in self.scope.get("subprotocols", ())

    async def accept(self, protocol: str | None = None, headers: Headers = ()) -> None:
        await self._receive()  # websocket.connect
        self.accepted = True
        message = {"type": "websocket.accept", "subprotocol": protocol, "headers": [*headers]}
        await self._put(message)

    async def receive(self) -> str | bytes:
        """Raises Left."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise Left(message.get("code", 1006), message.get("reason") or "")
        text: str | None = message.get("text")
        return message.get("bytes") or b"" if text is None else text

    async def say(self, data: str | bytes) -> None:
        kind = "text" if isinstance(data, str) else "bytes"
        await self._put({"type": "websocket.send", kind: data})

    async def tell(self, type: str, body: Any = None) -> None:
        """A JSON message: `type` first, then the fields of `body`."""
        fields = msgspec.to_builtins(body) if body is not None else {}
        await self.say(encode({"type": type, **fields}).decode())

    async def close(self, code: int, reason: str = "") -> None:
        cut = one_line(reason).encode()[:_MAX_REASON].decode("utf-8", "ignore")
        await self._put({"type": "websocket.close", "code": code, "reason": cut})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except (OSError, RuntimeError):
            # uvicorn's ClientDisconnected is an OSError; RuntimeError: a close crossed ours
            raise Left from None


class Inbox:
    """What the client sent and the program has not taken yet, up to a limit.

    Reading ahead is how its leaving is noticed while the program takes no input. At the limit we
    cannot tell any more, so such a client is let go after INPUT_PATIENCE without headway.
    """

    def __init__(self, socket: Socket, limit: int = 1024 * 1024) -> None:
        self._socket = socket
        self._limit = limit
        self._size = 0
        self._waiting: collections.deque[str | bytes] = collections.deque()
        self._changed = asyncio.Condition()

    async def fill(self) -> None:
        """Raises Left, or CapacityError when nobody takes the input; never returns."""
        while True:
            message = await self._socket.receive()
            async with self._changed:
                self._waiting.append(message)
                self._size += len(message) + _OVERHEAD
                self._changed.notify_all()
                await self._room()

    async def _room(self) -> None:
        while self._size > self._limit:
            try:
                await asyncio.wait_for(self._changed.wait(), INPUT_PATIENCE)
            except TimeoutError:
                text = f"the program has taken no input for {INPUT_PATIENCE:g} seconds"
                raise CapacityError(text, hint="attach again and send on when it reads") from None

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting)
                message = self._waiting.popleft()
                self._size -= len(message) + _OVERHEAD
                self._changed.notify_all()
            yield message


async def guarded(socket: Socket, handler: Callable[[Socket], Awaitable[None]]) -> None:
    """Run a handler. What it raises becomes an HTTP answer before the handshake, a close after
    it.
    """
    try:
        await handler(socket)
    except Left:
        pass
    except asyncio.CancelledError:
        if socket.accepted:
            await _close_quietly(socket, RESTART, RESTART_REASON)
        raise
    except Exception as error:  # the edge: whatever it is becomes an answer
        await refuse(socket, understand(error))


async def refuse(socket: Socket, error: CapsuleError) -> None:
    if not socket.accepted:
        await send_error(socket.scope, socket._receive, socket._send, error)
        return
    await _close_quietly(socket, close_code(error), f"{error.code}: {error}")


def close_code(error: CapsuleError) -> int:
    """Whose turn it is: the client's to change something, to wait or to leave it, or ours."""
    if isinstance(error, GoneError):
        return OVER
    if isinstance(error, CapacityError):
        return FULL
    return MISTAKE if error.http_status < 500 else FAULT


async def _close_quietly(socket: Socket, code: int, reason: str) -> None:
    try:
        await socket.close(code, reason)
    except Left:
        pass


async def race(*runners: Coroutine[Any, Any, object]) -> int:
    """Run all until the first ends, then cancel the others. Which one it was; raises what it
    raised.
    """
    tasks = [asyncio.ensure_future(runner) for runner in runners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        first = next((i for i, task in enumerate(tasks) if task.done()), 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tasks[first].result()
    return first


def query(scope: Scope, shape: type[T]) -> T:
    """The query string as `shape`: numbers may be written as text there."""
    words = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    try:
        return msgspec.convert(words, shape, strict=False)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`")
        problem = problem[:1].lower() + problem[1:]
        if field in words:
            problem = f"{problem.partition(', got ')[0]}, got {brief(words[field])}"
        raise invalid_field(field or "query", problem) from None
