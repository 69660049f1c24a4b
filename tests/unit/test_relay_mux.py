"""The host's end of the relay, over a socket pair. The test is the relay, and misbehaves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from capsule.errors import UnavailableError
from capsule.link.protocol import ProtocolError
from capsule.link.unix import UnixStream
from capsule.providers.docker.stdio import StreamDecoder, demultiplex
from capsule.providers.relay.channels import (
    HEADER,
    HEADER_SIZE,
    MAX_CHANNELS,
    MAX_DATA,
    VERSION,
    WINDOW,
    Kind,
    pack,
)
from capsule.providers.relay.mux import Mux, MuxStream

HELLO = pack(Kind.HELLO, 0, VERSION)
Heard = tuple[Kind, int, int, bytes]


class Relay:
    """The other end, by hand."""

    def __init__(self, stream: UnixStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self.raw = stream.send
        self.close = stream.close

    async def say(self, kind: Kind, channel: int, value: int = 0, payload: bytes = b"") -> None:
        await self.raw(pack(kind, channel, value, payload))

    async def data(self, channel: int, payload: bytes) -> None:
        await self.say(Kind.DATA, channel, len(payload), payload)

    async def hear(self) -> Heard:
        await self._fill(HEADER_SIZE)
        channel, kind, value = HEADER.unpack_from(self._buffer)
        whole = HEADER_SIZE + (value if kind == Kind.DATA else 0)
        await self._fill(whole)
        payload = bytes(self._buffer[HEADER_SIZE:whole])
        del self._buffer[:whole]
        return Kind(kind), channel, value, payload

    async def hear_data(self, size: int) -> bytes:
        """So many bytes of one channel, and no other frame between them."""
        received = b""
        while len(received) < size:
            kind, _, _, payload = await self.hear()
            assert kind is Kind.DATA
            received += payload
        return received

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            data = await self._stream.receive()
            assert data, "the host hung up"
            self._buffer += data

    async def gone(self) -> bool:
        """Whether the host has closed the carrier."""
        return not await self._stream.receive()


def pair() -> tuple[UnixStream, UnixStream]:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return UnixStream(ours, loop), UnixStream(theirs, loop)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Mux, Relay]]:
    carrier, other = pair()
    await other.send(HELLO)
    mux = await Mux.start(carrier)
    relay = Relay(other)
    try:
        assert await relay.hear() == (Kind.HELLO, 0, VERSION, b"")
        yield mux, relay
    finally:
        await mux.aclose()
        relay.close()


@asynccontextmanager
async def with_stream() -> AsyncIterator[tuple[Mux, Relay, MuxStream]]:
    async with connected() as (mux, relay):
        stream = await mux.open()
        assert (await relay.hear())[:2] == (Kind.OPEN, 0)
        yield mux, relay, stream


async def settled() -> None:
    """Lets the loop turn until tasks that can run have come to where they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_streams_that_send_much_share_the_carrier() -> None:
    """Frames of all senders alternate, however much each of them has."""
    async with connected() as (mux, relay):
        streams = [await mux.open() for _ in range(5)]
        tasks = [asyncio.create_task(stream.send(bytes(WINDOW))) for stream in streams]
        order: list[int] = []
        while len(order) < 5 * WINDOW // MAX_DATA:
            kind, channel, _, _ = await relay.hear()
            if kind is Kind.DATA:
                order.append(channel)
        await asyncio.gather(*tasks)
        halves = order[: len(order) // 2], order[len(order) // 2 :]
        assert all(set(half) == set(range(5)) for half in halves)


async def test_a_send_cancelled_while_the_carrier_is_full_corrupts_nothing() -> None:
    """At every moment of it: the relay reads late, and finds frames only."""
    async with connected() as (mux, relay):
        streams = [await mux.open() for _ in range(16)]
        for turns, stream in enumerate(streams):
            sending = asyncio.create_task(stream.send(bytes([stream._channel.number]) * WINDOW))
            for _ in range(turns):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait({sending})
            await stream.aclose()
        closed = 0
        while closed < len(streams):
            kind, channel, _, payload = await relay.hear()
            assert kind in (Kind.OPEN, Kind.DATA, Kind.CLOSE)
            assert set(payload) <= {channel}
            closed += kind is Kind.CLOSE
            if kind is Kind.CLOSE:
                await relay.say(Kind.CLOSE, channel)


async def test_channels_that_are_not_closed_are_not_lost() -> None:
    async with connected() as (mux, relay):
        for _ in range(3 * MAX_CHANNELS):
            stream = await mux.open()
            assert (await relay.hear())[:2] == (Kind.OPEN, 0)
            await relay.say(Kind.CLOSE, 0)
            assert await stream.receive() == b""
            assert (await relay.hear())[:2] == (Kind.CLOSE, 0)


BREAKS = {
    "the relay ended": b"",
    "garbage": b"HTTP/1.1 400 Bad Request",
    "a channel nobody opened": pack(Kind.DATA, 9, 1, b"x"),
}


@pytest.mark.parametrize("last", BREAKS.values(), ids=BREAKS.keys())
async def test_every_stream_breaks_with_the_carrier(last: bytes) -> None:
    async with connected() as (mux, relay):
        streams = [await mux.open() for _ in range(3)]
        for number in range(3):
            await relay.hear()
            await relay.data(number, b"before")
        receiving = asyncio.create_task(streams[0].receive(3))
        sending = asyncio.create_task(streams[1].send(bytes(4 * WINDOW)))
        assert await receiving == b"bef"
        await relay.hear_data(WINDOW)
        await relay.raw(last)
        if not last:
            relay.close()
        with pytest.raises(UnavailableError, match="broke"):
            await sending
        assert await streams[0].receive() == b"ore"  # it came in time
        assert await streams[1].receive() == b"before"
        for stream in streams[:2]:
            with pytest.raises(UnavailableError, match="broke"):
                await stream.receive()
            with pytest.raises(UnavailableError, match="broke"):
                await stream.send(b"x")
        assert not mux.usable
        with pytest.raises(UnavailableError):
            await mux.open()
        for stream in streams:
            await stream.aclose()


async def test_closing_lets_out_what_was_sent_and_closes_the_carrier() -> None:
    carrier, other = pair()
    await other.send(HELLO)
    mux = await Mux.start(carrier)
    stream = await mux.open()
    await stream.send(b"kill them all")
    waiting = asyncio.create_task(stream.receive())
    await settled()
    await mux.aclose()
    await mux.aclose()
    relay = Relay(other)
    heard = [await relay.hear() for _ in range(4)]
    assert [frame[0] for frame in heard] == [Kind.HELLO, Kind.OPEN, Kind.DATA, Kind.CLOSE]
    assert await relay.gone()
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(UnavailableError):
        await mux.open()
    relay.close()


async def test_closing_does_not_wait_for_a_carrier_that_is_stuck() -> None:
    async with connected() as (mux, _):
        streams = [await mux.open() for _ in range(20)]
        sending = [asyncio.create_task(stream.send(bytes(WINDOW))) for stream in streams]
        await settled()
        async with asyncio.timeout(5):
            await mux.aclose()
        done, _ = await asyncio.wait(sending)
        assert any(task.exception() is not None for task in done)


@pytest.mark.parametrize(
    "words", [b"OCI runtime exec failed: exec: no such file\r\n", b"short", b""]
)
async def test_what_is_no_relay_is_quoted_and_let_go(words: bytes) -> None:
    carrier, other = pair()
    if words:
        await other.send(words)
    starting = asyncio.create_task(Mux.start(carrier))
    assert await other.receive() == HELLO
    if len(words) < HEADER_SIZE:
        other.close()
    with pytest.raises(UnavailableError, match=words.decode().split(":")[0] or "ended"):
        await starting
    if len(words) >= HEADER_SIZE:
        assert await other.receive() == b""
    other.close()


def framed(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


def test_the_engines_frames_are_taken_apart_however_they_are_cut() -> None:
    wire = framed(1, b"out") + framed(2, b"err") + framed(1, b"") + framed(1, b"more")
    for cut in range(len(wire) + 1):
        decoder = StreamDecoder()
        pieces = decoder.feed(wire[:cut]) + decoder.feed(wire[cut:])
        assert b"".join(piece.data for piece in pieces if piece.stream == 1) == b"outmore"
        assert b"".join(piece.data for piece in pieces if piece.stream == 2) == b"err"
    large = StreamDecoder()  # of 4 GiB: its bytes are passed on as they come
    assert large.feed(framed(1, b"")[:4] + b"\xff\xff\xff\xff") == []
    assert [len(piece.data) for piece in large.feed(bytes(100_000))] == [100_000]
    for words in (b"\x04\x00\x00\x00\x00\x00\x00\x01", b"no such container"):
        with pytest.raises(ProtocolError):
            StreamDecoder().feed(words)


async def test_a_relay_through_the_engine() -> None:
    raw, other = pair()
    await other.send(framed(1, HELLO[:5]) + framed(1, HELLO[5:]))
    mux = await Mux.start(demultiplex(raw))
    stream = await mux.open()
    await other.send(framed(1, pack(Kind.DATA, 0, 2, b"hi")))
    assert await stream.receive() == b"hi"
    await other.send(framed(2, b"capsule-agent relay: not a frame\n"))
    other.close()
    with pytest.raises(UnavailableError, match="not a frame"):
        await stream.receive()
    await mux.aclose()
