"""Byte streams into a box (`dial`) and out of it (`listen`): all the networking a box has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

from capsule.errors import GoneError, NotFoundError
from capsule.link.conversation import (
    Connect,
    Conversation,
    Explain,
    expect,
    request_bytes,
    silence,
)
from capsule.link.errors_map import to_error
from capsule.link.parse import field
from capsule.link.protocol import FrameType
from capsule.link.stream import ByteStream

_QUIET = 20.0


class RawStream:
    """A connection after its last frame: from here on the bytes are the peer's inside the box."""

    __slots__ = ("_rest", "_stream")

    def __init__(self, stream: ByteStream, rest: bytes) -> None:
        self._stream = stream
        self._rest = rest  # what arrived together with the last frame

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self._rest:
            chunk, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
            return chunk
        return await self._stream.receive(max_bytes)

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    async def aclose(self) -> None:
        self._rest = b""
        await self._stream.aclose()


async def open_raw(
    connect: Connect, body: Mapping[str, Any], *, explain: Explain = to_error, timeout: float
) -> RawStream:
    try:
        async with asyncio.timeout(timeout):
            talk = await Conversation.begin(connect, request_bytes(body), explain)
            try:
                await talk.reply()
            except BaseException:
                await talk.aclose()
                raise
    except TimeoutError:
        raise silence(body["op"], timeout) from None
    return RawStream(talk.stream, talk.rest())


class Listener:
    """Connections made inside to the port. Each belongs to whoever takes it from the iterator."""

    def __init__(
        self,
        talk: Conversation,
        connect: Connect,
        alive: Callable[[], Awaitable[object]],
        timeout: float,
    ) -> None:
        self._talk = talk
        self._connect = connect
        self._alive = alive
        self._timeout = timeout

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ByteStream:
        while True:
            frame = await self._talk.next_patiently(self._alive, _QUIET)
            number = field(expect(frame, FrameType.EVENT), "stream", int)
            body = {"op": "take", "stream": number}
            try:
                return await open_raw(self._connect, body, timeout=self._timeout)
            except (NotFoundError, GoneError):
                continue  # whoever connected has given up; the next one has not


@asynccontextmanager
async def listen(
    connect: Connect, port: int, *, alive: Callable[[], Awaitable[object]], timeout: float
) -> AsyncIterator[Listener]:
    wire = request_bytes({"op": "listen", "port": port})
    async with await Conversation.begin_within(timeout, connect, wire, what="listen") as talk:
        expect(await talk.next_within(timeout, "listen"), FrameType.REPLY)
        yield Listener(talk, connect, alive, timeout)
