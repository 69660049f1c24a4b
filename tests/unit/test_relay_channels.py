"""The relay's frames and credits, against the golden files and against any bytes."""

from __future__ import annotations

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from capsule.providers.relay.lines import LONGEST, Lines
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
