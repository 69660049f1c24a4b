"""The host's end of the relay: its frames, its credits, and its streams over a socket pair.

The test is the relay, and misbehaves.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.errors import CapacityError, UnavailableError
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
    Arrived,
    Channel,
    Channels,
    Closed,
    Credited,
    Ended,
    Kind,
    pack,
)
from capsule.providers.relay.lines import LONGEST, Lines
from capsule.providers.relay.mux import Mux, MuxStream
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


def taken(core: Channels) -> bytes:
    data = bytes(core.out)
    core.out.clear()
    return data


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


def test_both_sides_begin_with_hello() -> None:
    core = Channels()
    assert core.out == HELLO
    core.feed(pack(Kind.HELLO, 0, VERSION + 6))  # a newer relay
    assert core.greeted
    wrong = (
        b"OCI runtime exec failed: no such file",
        pack(Kind.HELLO),
        pack(Kind.HELLO, 1, VERSION),
    )
    for first in wrong:
        with pytest.raises(ProtocolError, match="did not start, but said: '"):
            Channels().feed(first)


def test_data_goes_out_in_frames_and_never_beyond_the_credit() -> None:
    core, (channel,) = with_channels(1)
    data = memoryview(bytes(2 * WINDOW))
    sizes = []
    while size := core.send(channel, data):
        data = data[size:]
        sizes.append(size)
    assert sizes == [MAX_DATA] * (WINDOW // MAX_DATA)
    assert len(taken(core)) == WINDOW + len(sizes) * HEADER_SIZE
    assert core.feed(pack(Kind.WINDOW, channel.number, 10)) == [Credited(channel)]
    assert core.send(channel, data) == 10


def test_credit_is_returned_in_large_steps() -> None:
    core, (channel,) = with_channels(1)
    for _ in range(WINDOW // MAX_DATA):
        core.feed(pack(Kind.DATA, channel.number, MAX_DATA, bytes(MAX_DATA)))
    core.consumed(channel, WINDOW // 2 - 1)
    assert taken(core) == b""
    core.consumed(channel, 1)
    assert taken(core) == pack(Kind.WINDOW, channel.number, WINDOW // 2)


def test_a_number_is_not_used_again_before_both_sides_have_closed_it() -> None:
    core, (channel,) = with_channels(1)
    core.close(channel)
    core.close(channel)
    assert taken(core) == pack(Kind.CLOSE, channel.number)
    assert core.open().number != channel.number
    late = pack(Kind.DATA, channel.number, 4, b"late") + pack(Kind.WINDOW, channel.number, 1)
    channel.credit = 0
    assert core.feed(late + pack(Kind.EOF, channel.number)) == []
    taken(core)
    assert core.feed(pack(Kind.CLOSE, channel.number)) == []
    assert taken(core) == b""
    again = core.open()
    assert again.number == channel.number
    taken(core)
    assert core.feed(pack(Kind.CLOSE, again.number, 111)) == [Closed(again, 111)]
    core.close(again)
    assert taken(core) == pack(Kind.CLOSE, again.number)


def test_there_are_so_many_channels_and_no_more() -> None:
    core, channels = with_channels(MAX_CHANNELS)
    assert [channel.number for channel in channels] == list(range(MAX_CHANNELS))
    with pytest.raises(CapacityError):
        core.open()
    core.feed(pack(Kind.CLOSE, 77))
    assert core.open().number == 77


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


# Lines of base64


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 20))
def test_lines_are_put_together_however_they_are_cut(pieces: list[bytes], step: int) -> None:
    text = "".join(base64.b64encode(piece).decode() + "\n" for piece in pieces)
    lines = Lines()
    heard = b"".join(lines.feed(text[at : at + step]) for at in range(0, len(text), step))
    assert heard == b"".join(pieces)


@pytest.mark.parametrize("text", ["bash: no such file\n", "AAA\n", "AAAA\r\n", "é\n", "A===\n"])
def test_anything_but_lines_of_base64_is_an_error(text: str) -> None:
    with pytest.raises(ProtocolError, match="did not start, but said"):
        Lines().feed(text)


def test_no_line_is_endless() -> None:
    lines = Lines()
    with pytest.raises(ProtocolError, match="limit"):
        for _ in range(LONGEST // 65536 + 1):
            lines.feed("A" * 65536)


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
