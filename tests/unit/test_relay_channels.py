"""The relay's frames and credits: against the golden files, byte by byte, and against anything."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from capsule.errors import CapacityError
from capsule.link.protocol import ProtocolError
from capsule.providers.relay.channels import (
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
from tests.support import ROOT
from tests.support.relays import Golden, bad_frames, golden_frames

SPEC = (ROOT / "spec" / "relay.md").read_text(encoding="utf-8")
AGENT = (ROOT / "agent" / "relay.c").read_text(encoding="utf-8")
HELLO = pack(Kind.HELLO, 0, VERSION)


GOLDEN_FRAMES = golden_frames()
BAD_FRAMES = bad_frames()
FROM_RELAY = [frame for frame in GOLDEN_FRAMES if frame.sender != "host"]


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


@pytest.mark.parametrize("frame", GOLDEN_FRAMES, ids=lambda frame: frame.name)
def test_golden_frame_is_encoded_to_the_byte(frame: Golden) -> None:
    assert pack(frame.kind, frame.channel, frame.value, frame.payload) == frame.wire


@pytest.mark.parametrize("frame", FROM_RELAY, ids=lambda frame: frame.name)
def test_golden_frame_of_the_relay_is_understood_byte_by_byte(frame: Golden) -> None:
    core = Channels() if frame.kind is Kind.HELLO else greeted()
    channels = [core.open() for _ in range(MAX_CHANNELS)]
    channel = channels[frame.channel]
    for each in channels:
        each.credit = 0
    for byte in frame.wire[:-1]:
        assert core.feed(bytes([byte])) == []
    events = core.feed(frame.wire[-1:])
    assert (
        events
        == {
            Kind.HELLO: [],
            Kind.DATA: [Arrived(channel, frame.payload)],
            Kind.EOF: [Ended(channel)],
            Kind.CLOSE: [Closed(channel, frame.value)],
            Kind.WINDOW: [Credited(channel)],
        }[frame.kind]
    )
    assert core.rest == b""


def test_golden_frames_cover_every_kind() -> None:
    assert {frame.kind for frame in GOLDEN_FRAMES} == set(Kind)


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_what_the_relay_may_not_say_breaks_the_carrier_for_good(frame: bytes) -> None:
    core, _ = with_channels(1)
    with pytest.raises(ProtocolError):
        core.feed(frame)
    with pytest.raises(ProtocolError):
        core.feed(b"")
    assert core.rest == b""


def test_the_numbers_are_the_same_in_the_document_in_python_and_in_c() -> None:
    kinds = {kind.name: kind.value for kind in Kind}
    table = re.findall(r"^\| (\d+) \| `([A-Z]+)` \|", SPEC, re.M)
    assert {name: int(number) for number, name in table} == kinds
    found = re.search(r"enum relay_kind \{(.*?)\}", AGENT, re.S)
    assert found is not None and "R_HELLO = 1" in found[1]
    listed = [word.split("=")[0].strip().removeprefix("R_") for word in found[1].split(",")]
    assert listed == list(kinds)


def test_both_ends_have_the_same_bounds() -> None:
    assert f"#define RELAY_VERSION {VERSION}\n" in AGENT
    assert f"#define RELAY_HEAD {HEADER_SIZE}\n" in AGENT
    assert f"#define MAX_CHANNELS {MAX_CHANNELS}\n" in AGENT
    assert f"#define MAX_DATA ({MAX_DATA >> 10}u << 10)\n" in AGENT
    assert f"#define WINDOW ({WINDOW >> 10}u << 10)\n" in AGENT
    assert f"0 to {MAX_CHANNELS - 1};" in SPEC
    assert f"1 to {MAX_DATA:,} " in SPEC
    assert f"{WINDOW:,} bytes" in SPEC


def test_the_greeting_is_said_before_anything_is_heard() -> None:
    assert Channels().out == HELLO


def test_a_newer_relay_is_taken() -> None:
    core = Channels()
    core.feed(pack(Kind.HELLO, 0, VERSION + 6))
    assert core.greeted


@pytest.mark.parametrize(
    "first",
    [b"OCI runtime exec failed: no such file", pack(Kind.HELLO), pack(Kind.HELLO, 1, VERSION)],
)
def test_what_does_not_begin_with_hello_is_quoted(first: bytes) -> None:
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


def test_more_than_the_window_is_refused() -> None:
    core, (channel,) = with_channels(1)
    frame = pack(Kind.DATA, channel.number, MAX_DATA, bytes(MAX_DATA))
    for _ in range(WINDOW // MAX_DATA):
        core.feed(frame)
    with pytest.raises(ProtocolError, match="more than it may"):
        core.feed(pack(Kind.DATA, channel.number, 1, b"x"))


def test_nothing_comes_after_the_end() -> None:
    core, (channel,) = with_channels(1)
    assert core.feed(pack(Kind.EOF, channel.number)) == [Ended(channel)]
    assert core.send(channel, b"still listening") == 15
    with pytest.raises(ProtocolError):
        core.feed(pack(Kind.DATA, channel.number, 1, b"x"))


def test_the_relays_close_is_answered_once_and_frees_the_number() -> None:
    core, (channel,) = with_channels(1)
    assert core.feed(pack(Kind.CLOSE, channel.number, 111)) == [Closed(channel, 111)]
    core.close(channel)
    assert taken(core) == pack(Kind.CLOSE, channel.number)
    assert core.open().number == channel.number


def test_a_number_is_not_used_again_before_the_relay_has_closed_it_too() -> None:
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
    assert core.open().number == channel.number


def test_there_are_so_many_channels_and_no_more() -> None:
    core, channels = with_channels(MAX_CHANNELS)
    assert [channel.number for channel in channels] == list(range(MAX_CHANNELS))
    with pytest.raises(CapacityError):
        core.open()
    core.feed(pack(Kind.CLOSE, 77))
    assert core.open().number == 77


@given(st.lists(st.binary(max_size=200), max_size=8), st.booleans())
def test_arbitrary_bytes_are_events_or_a_protocol_error(chunks: list[bytes], hello: bool) -> None:
    core = greeted() if hello else Channels()
    core.open()
    try:
        for chunk in chunks:
            core.feed(chunk)
            assert len(core.rest) < HEADER_SIZE + MAX_DATA
    except ProtocolError:
        assert core.rest == b""


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


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.data())
def test_data_comes_out_as_it_went_in_however_it_is_cut(
    pieces: list[bytes], data: st.DataObject
) -> None:
    core, (channel,) = with_channels(1)
    wire = b"".join(pack(Kind.DATA, 0, len(piece), piece) for piece in pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    events = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        events += core.feed(wire[start:end])
    assert events == [Arrived(channel, piece) for piece in pieces]
    assert core.rest == b""


class Honest(RuleBasedStateMachine):
    """Both ends as they should be: whatever they do in whatever order, neither complains.

    The other end is a model of the relay: it echoes, as far as it has credit, and hangs up at will.
    """

    def __init__(self) -> None:
        super().__init__()
        self.core = greeted()
        self.to_relay = bytearray()
        self.to_host = bytearray()
        self.relay: dict[int, list[int]] = {}  # number: [credit, owed, hung up]
        self.held: dict[int, Channel] = {}
        self.sent: dict[int, bytearray] = {}
        self.echoed: dict[int, bytearray] = {}
        self.unread: dict[int, int] = {}

    @precondition(lambda self: len(self.held) < 5)
    @rule()
    def open(self) -> None:
        channel = self.core.open()
        assert channel.number not in self.held
        self.held[channel.number] = channel
        self.sent[channel.number] = bytearray()
        self.echoed[channel.number] = bytearray()
        self.unread[channel.number] = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), size=st.sampled_from([1, 100, MAX_DATA, 100_000]))
    def send(self, data: st.DataObject, size: int) -> None:
        channel = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        piece = bytes([len(self.sent[channel.number]) % 251]) * size
        self.sent[channel.number] += piece[: self.core.send(channel, piece)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.core.consumed(self.held[number], self.unread[number])
        self.unread[number] = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        channel = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.core.close(channel)

    @rule(size=st.integers(1, 200_000))
    def carry_out(self, size: int) -> None:
        self.to_relay += self.core.out[:size]
        del self.core.out[:size]
        while len(self.to_relay) >= HEADER_SIZE:
            number, kind, value = (
                int.from_bytes(self.to_relay[at : at + 4], "big") for at in (0, 4, 8)
            )
            whole = HEADER_SIZE + (value if kind == Kind.DATA else 0)
            if len(self.to_relay) < whole:
                return
            payload = bytes(self.to_relay[HEADER_SIZE:whole])
            del self.to_relay[:whole]
            self.relay_hears(Kind(kind), number, value, payload)

    def relay_hears(self, kind: Kind, number: int, value: int, payload: bytes) -> None:
        state = self.relay.get(number)
        if kind is Kind.OPEN:
            assert state is None
            self.relay[number] = [WINDOW, 0, 0]
            return
        assert state is not None
        if kind is Kind.CLOSE:
            if not state[2]:
                self.to_host += pack(Kind.CLOSE, number)
            del self.relay[number]
        elif not state[2] and kind is Kind.WINDOW:
            state[0] += value
            assert state[0] <= WINDOW
        elif not state[2]:
            size = min(state[0], len(payload))
            if size:
                self.to_host += pack(Kind.DATA, number, size, payload[:size])
            state[0] -= size
            self.to_host += pack(Kind.WINDOW, number, value)

    @precondition(lambda self: any(not state[2] for state in self.relay.values()))
    @rule(data=st.data(), half=st.booleans())
    def hang_up(self, data: st.DataObject, half: bool) -> None:
        open_ = sorted(number for number, state in self.relay.items() if not state[2])
        number = data.draw(st.sampled_from(open_))
        self.relay[number][2] = 1
        if half:
            self.to_host += pack(Kind.EOF, number)
        self.to_host += pack(Kind.CLOSE, number)

    @rule(size=st.integers(1, 200_000))
    def carry_in(self, size: int) -> None:
        data = bytes(self.to_host[:size])
        del self.to_host[:size]
        for event in self.core.feed(data):
            number = event.channel.number
            assert self.held[number] is event.channel
            if isinstance(event, Arrived):
                self.echoed[number] += event.data
                self.unread[number] += len(event.data)
            elif isinstance(event, Closed):
                del self.held[number]

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        for number in self.held:
            assert self.sent[number].startswith(self.echoed[number][:WINDOW])
            assert self.unread[number] <= WINDOW


TestHonest = Honest.TestCase
