"""One connection to the agent, which is one operation: a request out, frames in, closed.

Nothing here starts a task. Whoever opens a Conversation closes it; cancelling any of its waits
loses no frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from capsule import surroundings
from capsule.errors import CapsuleError, UnavailableError
from capsule.link.errors_map import to_error
from capsule.link.protocol import (
    VERSION,
    Decoder,
    Frame,
    FrameType,
    ProtocolError,
    dump,
    load,
    pack,
)
from capsule.link.stream import ByteStream
from capsule.tracing import span

Connect = Callable[[], Awaitable[ByteStream]]
Explain = Callable[[Mapping[str, Any]], CapsuleError]

CHUNK = 256 * 1024  # what one receive asks for
PIECE = 256 * 1024  # data sent in one frame: large enough for speed, small enough to stay fair

GREETING = pack(FrameType.HELLO, dump({"version": VERSION}))
_USUAL_HELLO = dump({"version": VERSION})


def request_bytes(body: Mapping[str, Any]) -> bytes:
    """HELLO and REQUEST, to be sent in one write."""
    return GREETING + pack(FrameType.REQUEST, dump(body))


class Conversation:
    """The frames of one operation. ERROR frames are raised as what they mean."""

    __slots__ = ("_decoder", "_explain", "greeted", "stream")

    def __init__(self, stream: ByteStream, explain: Explain = to_error) -> None:
        self.stream = stream
        self._explain = explain
        self._decoder = Decoder()
        self.greeted = False

    @classmethod
    async def begin(cls, connect: Connect, wire: bytes, explain: Explain = to_error) -> Self:
        """Connects and sends `wire`. The caller owns the deadline, and closes."""
        stream = await connect()
        try:
            # If the agent has hung up already, why is in what it sent before: let `next` find it.
            with suppress(UnavailableError):
                await stream.send(wire)
        except BaseException:
            await stream.aclose()
            raise
        return cls(stream, explain)

    @classmethod
    async def begin_within(
        cls,
        seconds: float,
        connect: Connect,
        wire: bytes,
        *,
        what: str,
        explain: Explain = to_error,
    ) -> Self:
        try:
            async with asyncio.timeout(seconds):
                with span(f"agent {what.partition(' ')[0]}"):
                    return await cls.begin(connect, wire, explain)
        except TimeoutError:
            raise silence(what, seconds) from None

    async def next(self) -> Frame:
        """The next frame after the greeting. The caller owns the deadline.

        Raises what an ERROR frame says, and UnavailableError when the connection ends.
        """
        while True:
            frame = self._decoder.pop()
            if frame is None:
                data = await self.stream.receive(CHUNK)
                if not data:
                    # Where no process can be made, whoever was to answer was not made either.
                    full = surroundings.exhausted() or None
                    raise UnavailableError("the agent hung up before it was done", hint=full)
                self._decoder.push(data)
            elif frame.type is FrameType.ERROR:
                raise self._explain(load(frame.payload))
            elif self.greeted:
                return frame
            else:
                self._greet(frame)

    def _greet(self, frame: Frame) -> None:
        if frame.type is not FrameType.HELLO:
            raise ProtocolError(f"agent began with {frame.type.name}, not HELLO")
        if frame.payload != _USUAL_HELLO and load(frame.payload).get("version") != VERSION:
            raise ProtocolError(f"agent speaks another protocol: {frame.payload[:100]!r}")
        self.greeted = True

    async def reply(self) -> dict[str, Any]:
        """The body of the REPLY that must come next."""
        return expect(await self.next(), FrameType.REPLY)

    async def next_within(self, seconds: float, what: str) -> Frame:
        try:
            async with asyncio.timeout(seconds):
                return await self.next()
        except TimeoutError:
            raise silence(what, seconds) from None

    async def next_patiently(self, alive: Callable[[], Awaitable[object]], every: float) -> Frame:
        """Waits for as long as it takes, while the agent still answers `alive` elsewhere.

        For what may rightly be quiet for hours: a program, a watch. A dead agent closes the
        connection; this finds the one that is stuck.
        """
        while True:
            try:
                async with asyncio.timeout(every):
                    return await self.next()
            except TimeoutError:
                await alive()

    async def send_within(self, data: bytes, seconds: float, what: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.stream.send(data)
        except TimeoutError:
            raise silence(what, seconds) from None

    async def send_patiently(
        self, data: bytes, alive: Callable[[], Awaitable[object]], every: float
    ) -> None:
        """For input to a program, which need not read it soon.

        A frame sent in half is the end of the stream.
        """
        sending = asyncio.ensure_future(self.stream.send(data))
        try:
            while not (await asyncio.wait({sending}, timeout=every))[0]:
                await alive()
        except BaseException:
            sending.cancel()
            await self.stream.aclose()
            await asyncio.wait({sending})
            if not sending.cancelled():
                sending.exception()  # seen: closing it was ours
            raise
        await sending

    def rest(self) -> bytes:
        """What came after the last frame: the first bytes of a raw stream."""
        return self._decoder.rest()

    async def aclose(self) -> None:
        await self.stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stream.aclose()


class SilentError(UnavailableError):
    """The agent may be busy: what was asked for may still happen."""


def silence(what: str, seconds: float) -> SilentError:
    return SilentError(f"agent did not answer: {what}, waited {seconds:g} s")


def expect(frame: Frame, type: FrameType) -> dict[str, Any]:
    if frame.type is not type:
        raise ProtocolError(f"agent sent {frame.type.name} where {type.name} belongs")
    return load(frame.payload)


async def call(
    connect: Connect, body: Mapping[str, Any], *, timeout: float, explain: Explain = to_error
) -> dict[str, Any]:
    """A request with one answer."""
    try:
        async with asyncio.timeout(timeout):
            with span(f"agent {body['op']}"):
                async with await Conversation.begin(connect, request_bytes(body), explain) as talk:
                    return await talk.reply()
    except TimeoutError:
        raise silence(body["op"], timeout) from None
