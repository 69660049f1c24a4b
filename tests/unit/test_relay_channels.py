"""The host's end of the relay: its frames, its credits, and its streams over a socket pair.

The test is the relay, and misbehaves.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.errors import UnavailableError
from capsule.link.protocol import ProtocolError
from capsule.link.unix import UnixStream
from capsule.providers.relay.channels import (
    HEADER,
    HEADER_SIZE,
    MAX_CHANNELS,
    MAX_DATA,
    VERSION,
    WINDOW,
    Arrived,
    Channel,
    Channels,
    Closed,
    Credited,
    Ended,
    Kind,
    pack,
)
from capsule.providers.relay.mux import Mux
from tests.support import ROOT
from tests.support.relays import Golden, bad_frames, golden_frames

SPEC = (ROOT / "spec" / "relay.md").read_text(encoding="utf-8")
AGENT = (ROOT / "agent" / "relay.c").read_text(encoding="utf-8")
HELLO = pack(Kind.HELLO, 0, VERSION)


def greeted() -> Channels:
    core = Channels()
    assert core.feed(HELLO) == []
    core.out.clear()
    return core


def with_channels(count: int) -> tuple[Channels, list[Channel]]:
    core = greeted()
    channels = [core.open() for _ in range(count)]
    core.out.clear()
    return core, channels


@pytest.mark.parametrize("frame", golden_frames(), ids=lambda frame: frame.name)
def test_golden_frames(frame: Golden) -> None:
    assert pack(frame.kind, frame.channel, frame.value, frame.payload) == frame.wire
    if frame.sender == "host":
        return
    core = Channels() if frame.kind is Kind.HELLO else greeted()
    channels = [core.open() for _ in range(MAX_CHANNELS)]
    channel = channels[frame.channel]
    channel.credit = 0
    for byte in frame.wire[:-1]:
        assert core.feed(bytes([byte])) == []
    expected: dict[Kind, list[object]] = {
        Kind.HELLO: [],
        Kind.DATA: [Arrived(channel, frame.payload)],
        Kind.EOF: [Ended(channel)],
        Kind.CLOSE: [Closed(channel, frame.value)],
        Kind.WINDOW: [Credited(channel)],
    }
    assert core.feed(frame.wire[-1:]) == expected[frame.kind]
    assert core.rest == b""


FULL = pack(Kind.DATA, 0, MAX_DATA, bytes(MAX_DATA)) * (WINDOW // MAX_DATA)
ONE_MORE = pack(Kind.DATA, 0, 1, b"x")
BAD = {
    **bad_frames(),
    "more than the window": FULL + ONE_MORE,
    "data after the end": pack(Kind.EOF, 0) + ONE_MORE,
}


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD.keys())
def test_what_the_relay_may_not_say_breaks_the_carrier_for_good(frames: bytes) -> None:
    core, _ = with_channels(1)
    for data in (frames, b""):
        with pytest.raises(ProtocolError):
            core.feed(data)
    assert core.rest == b""


def test_the_numbers_are_the_same_in_the_document_in_python_and_in_c() -> None:
    kinds = {kind.name: kind.value for kind in Kind}
    assert {frame.kind for frame in golden_frames()} == set(Kind)
    table = re.findall(r"^\| (\d+) \| `([A-Z]+)` \|", SPEC, re.M)
    assert {name: int(number) for number, name in table} == kinds
    found = re.search(r"enum relay_kind \{(.*?)\}", AGENT, re.S)
    assert found is not None and "R_HELLO = 1" in found[1]
    listed = [word.split("=")[0].strip().removeprefix("R_") for word in found[1].split(",")]
    assert listed == list(kinds)
    for name, value in {
        "RELAY_VERSION": VERSION,
        "RELAY_HEAD": HEADER_SIZE,
        "MAX_CHANNELS": MAX_CHANNELS,
        "MAX_DATA": f"({MAX_DATA >> 10}u << 10)",
        "WINDOW": f"({WINDOW >> 10}u << 10)",
    }.items():
        assert f"#define {name} {value}\n" in AGENT
    for bound in (f"0 to {MAX_CHANNELS - 1};", f"1 to {MAX_DATA:,} ", f"{WINDOW:,} bytes"):
        assert bound in SPEC


small = st.integers(0, 5)
frames = st.builds(
    pack,
    st.sampled_from(Kind),
    small,
    small | st.sampled_from([MAX_DATA, WINDOW, 2**32 - 1]),
    st.binary(max_size=8),
)


@given(st.lists(frames, max_size=20), st.lists(small, max_size=5))
def test_frames_that_are_almost_right_are_events_or_a_protocol_error(
    sent: list[bytes], closed: list[int]
) -> None:
    core, channels = with_channels(4)
    for number in closed:
        if number < len(channels):
            core.close(channels[number])
    try:
        for frame in sent:
            core.feed(frame)
    except ProtocolError:
        pass


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
