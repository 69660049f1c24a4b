"""Connections to a box's agent through its relay, over one stream (spec/relay.md).

    Mux._run            owned by the Mux, ended by `aclose` and when the carrier breaks
    ├── Mux._read       receives from the carrier, all the time: whatever a channel brings has room
    │                   in its stream's buffer, or it would have had no credit
    └── Mux._write      sends to it, whole frames only, whoever is cancelled meanwhile; takes from
                        the streams that wait in `send` in turn, one frame each

Streams have no task. `open` and closing wait for nothing, so there is no moment at which being
cancelled could lose a channel.
"""

from __future__ import annotations

import asyncio
import errno
import os
from asyncio import Event, Future
from collections import deque
from typing import Self

from capsule.errors import UnavailableError
from capsule.link.stream import ByteStream
from capsule.link.unix import NobodyListensError
from capsule.providers.cleanup import finish, to_the_end
from capsule.providers.relay.channels import (
    MAX_DATA,
    Arrived,
    Channel,
    Channels,
    Closed,
    Credited,
)

_CHUNK = 256 * 1024  # what one receive asks for
_FULL = 256 * 1024  # what waits for the carrier at most, besides frames without data
_FLUSH = 1.0  # seconds for the last frames to leave when we are closed
_NOT_THERE = (errno.ECONNREFUSED, errno.ENOENT)


class Mux:
    """One relay and its channels. Whoever starts it closes it; after it broke, start another."""

    def __init__(self, carrier: ByteStream) -> None:
        self._carrier = carrier
        self._core = Channels()
        self._streams: dict[Channel, MuxStream] = {}  # not by number: those are used again
        self._ready: deque[MuxStream] = deque()  # have something to send, and credit
        self._wake = Event()
        self._greeted = Event()
        self._closing = False
        self._reason: str | None = None  # why it is over
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, carrier: ByteStream) -> Self:
        """Returns when the relay has answered; the caller owns the deadline, and we the carrier.

        Raises UnavailableError, with what came instead of a relay's words. Then, and when it is
        cancelled, the carrier is closed.
        """
        mux = cls(carrier)
        mux._task = asyncio.create_task(mux._run())
        try:
            await mux._greeted.wait()
            mux._check()
        except BaseException:
            await mux.aclose()
            raise
        return mux

    @property
    def usable(self) -> bool:
        return self._reason is None and not self._closing

    async def open(self) -> MuxStream:
        """A fresh connection. That nobody listens is found out by its first `receive`.

        Raises UnavailableError when the carrier is broken, and CapacityError.
        """
        self._check()
        channel = self._core.open()  # leaves together with the first bytes, or soon
        stream = self._streams[channel] = MuxStream(self, channel)
        self._wake.set()
        return stream

    async def aclose(self) -> None:
        """Idempotent. Closes every stream, lets what was sent leave, and closes the carrier."""
        await to_the_end(self._end())

    async def _end(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()
        self._closing = True
        self._wake.set()
        if self._task is not None and not (await asyncio.wait({self._task}, timeout=_FLUSH))[0]:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        reason = "it failed"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read())
                tasks.create_task(self._write())
        except* UnavailableError as group:  # anything else is a bug, and asyncio reports it
            reason = str(group.exceptions[0])
        finally:
            self._break(reason)
            await finish(self._carrier.aclose(), "stream to the relay", budget=5.0)

    def _break(self, reason: str) -> None:
        self._reason = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(UnavailableError, f"connection to the agent broke: {reason}")
        self._greeted.set()

    def _check(self) -> None:
        if self._reason is not None or self._closing:
            reason = self._reason or "it was closed"
            raise UnavailableError(f"no connection to the agent: {reason}")

    async def _read(self) -> None:
        while data := await self._carrier.receive(_CHUNK):
            for event in self._core.feed(data):
                stream = self._streams[event.channel]
                if isinstance(event, Arrived):
                    stream.arrived(event.data)
                elif isinstance(event, Credited):
                    stream.credited()
                elif isinstance(event, Closed):
                    del self._streams[event.channel]
                    stream.hung_up(event.errno)
                else:
                    stream.ended()
            if self._core.greeted:
                self._greeted.set()
            if self._core.out:
                self._wake.set()
        said = f", and said: {self._core.rest[:200]!r}" if self._core.rest else ""
        raise UnavailableError(f"the relay ended{said}")

    async def _write(self) -> None:
        core, ready = self._core, self._ready
        while True:
            while ready and len(core.out) < _FULL:
                stream = ready.popleft()
                if stream.offer():
                    ready.append(stream)
            if core.out:
                data = bytes(core.out)
                core.out.clear()
                await self._carrier.send(data)
            elif self._closing:
                raise UnavailableError("it was closed")
            else:
                self._wake.clear()
                await self._wake.wait()

    # For streams.

    def take(self, channel: Channel, data: bytes) -> bool:
        """Whether it could be taken at once: one frame, and nobody waits. The usual case."""
        waits = self._ready or len(self._core.out) >= _FULL
        if waits or len(data) > min(channel.credit, MAX_DATA):
            return False
        self._core.send(channel, data)
        self._wake.set()
        return True

    def take_one(self, channel: Channel, data: memoryview) -> int:
        return self._core.send(channel, data)

    def queue(self, stream: MuxStream) -> None:
        self._ready.append(stream)
        self._wake.set()

    def consumed(self, channel: Channel, size: int) -> None:
        self._core.consumed(channel, size)
        if self._core.out:
            self._wake.set()

    def forget(self, channel: Channel) -> None:
        if self._streams.pop(channel, None) is not None:
            self._core.close(channel)
            self._wake.set()


class MuxStream:
    """One reader and one writer at a time. A cancelled `receive` loses no byte."""

    __slots__ = (
        "_buffer", "_channel", "_closed", "_ended", "_failure", "_mux", "_queued", "_rest",
        "_sender", "_waiter",
    )  # fmt: skip

    def __init__(self, mux: Mux, channel: Channel) -> None:
        self._mux = mux
        self._channel = channel
        self._buffer = bytearray()  # at most the channel's window
        self._ended = False
        self._closed = False
        self._failure: tuple[type[UnavailableError], str] | None = None
        self._waiter: Future[None] | None = None
        self._sender: Future[None] | None = None
        self._rest = memoryview(b"")  # of what is being sent
        self._queued = False  # for our turn to send

    @property
    def broken(self) -> bool:
        return self._failure is not None

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._buffer:
            if self._ended:
                return b""
            self._check()
            await self._arrival()
        chunk = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        self._mux.consumed(self._channel, len(chunk))
        return chunk

    async def _arrival(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("two tasks receive from one stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def send(self, data: bytes) -> None:
        self._check()
        if self._channel.closed:
            raise UnavailableError("connection to the agent broke: it hung up")
        if self._sender is not None:
            raise RuntimeError("two tasks send to one stream")
        if self._mux.take(self._channel, data):
            return
        self._rest = memoryview(data)
        self._sender = asyncio.get_running_loop().create_future()
        self.credited()
        try:
            await self._sender
        finally:
            self._sender = None
            self._rest = memoryview(b"")

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ended = False
        self._buffer.clear()
        self._mux.forget(self._channel)
        self.fail(UnavailableError, "connection to the agent is closed")

    def _check(self) -> None:
        if self._failure is not None:
            kind, message = self._failure
            raise kind(message)

    # Called by the Mux, which reads and writes for all.

    def arrived(self, data: bytes) -> None:
        self._buffer += data
        _set(self._waiter)

    def ended(self) -> None:
        self._ended = True
        _set(self._waiter)

    def hung_up(self, number: int) -> None:
        """What arrived before is still there to be received."""
        if number == 0:
            self.ended()
            self._stop_sending("connection to the agent broke: it hung up")
            return
        kind = NobodyListensError if number in _NOT_THERE else UnavailableError
        self.fail(kind, f"connection to the agent broke: {os.strerror(number)}")

    def fail(self, kind: type[UnavailableError], message: str) -> None:
        self._failure = self._failure or (kind, message)
        _set(self._waiter)
        self._stop_sending(message)

    def _stop_sending(self, message: str) -> None:
        if self._sender is not None and not self._sender.done():
            self._sender.set_exception(UnavailableError(message))

    def credited(self) -> None:
        if self._rest and self._channel.credit and not self._queued:
            self._queued = True
            self._mux.queue(self)

    def offer(self) -> bool:
        """Our turn: one frame. Whether we want another."""
        self._queued = False
        if self._sender is None or self._sender.done() or self._channel.closed:
            return False
        self._rest = self._rest[self._mux.take_one(self._channel, self._rest) :]
        if not self._rest:
            self._sender.set_result(None)
        self._queued = bool(self._rest) and self._channel.credit > 0
        return self._queued


def _set(waiter: Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
