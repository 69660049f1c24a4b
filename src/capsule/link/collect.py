"""The short way through an exec: everything it printed, when it has ended.

An exec of `true` is one write and two reads here: no task, no queue, no object per chunk. Only
input too large for that write gets a task (`_beside`), which is cancelled and awaited before we
return.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from capsule.errors import UnavailableError, WrongStateError
from capsule.link.conversation import (
    PIECE,
    Connect,
    Conversation,
    Explain,
    request_bytes,
    silence,
)
from capsule.link.exec_stream import MAX_CARRY, OVERTIME, ExecStream, Output
from capsule.link.parse import exit_of, field
from capsule.link.protocol import Channel, FrameType, ProtocolError, load, pack
from capsule.link.requests import exec_body
from capsule.model import ExecRequest, Exit, Stream

_INLINE = 64 * 1024  # input up to this goes out with the request
_SMALL = 128 * 1024  # output up to this is taken in without asking for room

Room = Callable[[int], Awaitable[None]]

_CHANNELS = {
    Stream.STDOUT: Channel.STDOUT,
    Stream.STDERR: Channel.STDERR,
    Stream.PTY: Channel.TERMINAL,
}


class Collected(NamedTuple):
    exit: Exit
    stdout: bytes  # everything, if it had a terminal
    stderr: bytes
    carry: bytes


async def collect(
    connect: Connect,
    request: ExecRequest,
    explain: Explain,
    *,
    input: bytes,
    start_timeout: float,
    room: Room | None = None,
) -> Collected:
    """`request.timeout` must be set: it is what bounds the wait."""
    wire = request_bytes(exec_body(request))
    inline = not request.stdin or len(input) <= _INLINE
    if inline and request.stdin:
        wire += _input_frames(input)
    seconds = start_timeout
    limit = asyncio.timeout(seconds)

    async def make_room(size: int) -> None:
        """What the agent has to say waits there; the time it takes is not the agent's."""
        if room is not None:
            limit.reschedule(None)
            await room(size)
            limit.reschedule(asyncio.get_running_loop().time() + seconds)

    try:
        async with limit:
            async with await Conversation.begin(connect, wire, explain) as talk:
                field(await talk.reply(), "pid", int)
                seconds = request.timeout + OVERTIME
                limit.reschedule(asyncio.get_running_loop().time() + seconds)
                if inline:
                    return await _drain(talk, request, make_room)
                async with _beside(_feed(talk, input)):
                    return await _drain(talk, request, make_room)
    except TimeoutError:
        raise silence(f"exec {request.id}", seconds) from None


async def collect_patiently(
    stream: ExecStream, request: ExecRequest, input: bytes, room: Room | None = None
) -> Collected:
    """The same for an exec without a timeout: silence may last, as long as the agent answers."""
    gathered = _Gathered(request)
    async with _beside(_feed_stream(stream, input) if request.stdin else None):
        async for item in stream:
            if isinstance(item, Output):
                if room is not None and (more := gathered.wants(len(item.data))):
                    await room(more)
                gathered.add(_CHANNELS[item.stream], item.data)
    if stream.carry:
        gathered.add(Channel.CARRY, stream.carry)
    assert stream.exit is not None  # the iteration ends in no other way
    return gathered.result(stream.exit)


async def _drain(talk: Conversation, request: ExecRequest, room: Room) -> Collected:
    gathered = _Gathered(request)
    while True:
        kind, channel, _, payload = await talk.next()
        if kind is FrameType.DATA:
            if more := gathered.wants(len(payload)):
                await room(more)
            gathered.add(channel, payload)
        elif kind is FrameType.EXIT:
            return gathered.result(exit_of(load(payload)))
        elif kind is not FrameType.EVENT and kind is not FrameType.EOF:
            raise ProtocolError(f"agent sent {kind.name} during an exec")


class _Gathered:
    """Output by channel, bounded by what was asked for whatever the agent sends."""

    __slots__ = ("_left", "_request", "_sinks")

    def __init__(self, request: ExecRequest) -> None:
        self._request = request
        self._sinks: dict[int, _Sink] = {}
        self._left = _SMALL  # of the room there is for it

    def wants(self, size: int) -> int:
        """How much room to ask for before so many bytes more are added; usually none."""
        self._left -= size
        if self._left >= 0:
            return 0
        self._left += self._request.output_limit
        return self._request.output_limit

    def add(self, channel: int, data: bytes) -> None:
        sink = self._sinks.get(channel)
        if sink is None:
            sink = self._sinks[channel] = self._sink(channel)
        sink.add(data)

    def _sink(self, channel: int) -> _Sink:
        if channel == Channel.CARRY:
            return _Sink(MAX_CARRY, tail=False)
        if channel in _CHANNELS.values():
            return _Sink(self._request.output_limit, tail=self._request.keep == "tail")
        raise ProtocolError(f"agent sent output on stream {channel}")

    def result(self, exit: Exit) -> Collected:
        value = self._value
        stdout = value(Channel.STDOUT) or value(Channel.TERMINAL)
        return Collected(exit, stdout, value(Channel.STDERR), value(Channel.CARRY))

    def _value(self, channel: Channel) -> bytes:
        sink = self._sinks.get(channel)
        return b"" if sink is None else sink.value()


class _Sink:
    """What is kept of one stream: all of it, as the agent stops at the limit, or the last of it."""

    __slots__ = ("_limit", "_parts", "_size", "_tail")

    def __init__(self, limit: int, tail: bool) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._limit = limit
        self._tail = tail

    def add(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size <= self._limit:
            return
        if not self._tail:
            raise ProtocolError(f"agent sent more output than asked for, limit {self._limit}")
        if self._size >= 2 * self._limit:  # rarely, so that each byte is copied only once or twice
            self._trim()

    def _trim(self) -> None:
        self._parts = [b"".join(self._parts)[max(0, self._size - self._limit) :]]
        self._size = len(self._parts[0])

    def value(self) -> bytes:
        if self._size > self._limit:
            self._trim()
        return b"".join(self._parts)


def _input_frames(data: bytes) -> bytes:
    end = pack(FrameType.EOF, stream=Channel.STDIN, offset=len(data))
    return pack(FrameType.DATA, data, stream=Channel.STDIN) + end if data else end


async def _feed(talk: Conversation, data: bytes) -> None:
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        await talk.stream.send(pack(FrameType.DATA, piece, stream=Channel.STDIN, offset=start))
    await talk.stream.send(pack(FrameType.EOF, stream=Channel.STDIN, offset=len(data)))


async def _feed_stream(stream: ExecStream, data: bytes) -> None:
    await stream.send(data)
    await stream.send_eof()


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None] | None) -> AsyncIterator[None]:
    """Feeds a program while its output is read.

    One that ends without reading its input is no failure, and a connection that breaks is noticed
    by whoever reads from it, so neither is raised from here.
    """
    if work is None:
        yield
        return
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            with suppress(UnavailableError, WrongStateError):
                task.result()
