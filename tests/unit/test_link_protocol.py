"""The frames: against the golden files, byte by byte, and against anything at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.errors import CapsuleError, InvalidError, TooLargeError
from capsule.link.protocol import (
    HEADER,
    HEADER_SIZE,
    MAX_PAYLOAD,
    Decoder,
    Frame,
    FrameType,
    ProtocolError,
    dump,
    encode,
    load,
    pack,
)
from tests.support import ROOT

GOLDEN = ROOT / "spec" / "golden"


def rows(file: str) -> Iterator[list[str]]:
    for line in (GOLDEN / file).read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            yield line.split(" ")


def unhex(text: str) -> bytes:
    return b"" if text == "-" else bytes.fromhex(text)


def golden_frames() -> list[tuple[str, Frame, bytes]]:
    return [
        (name, Frame(FrameType(int(kind)), int(stream), int(offset), unhex(payload)), unhex(wire))
        for name, kind, stream, offset, payload, wire in rows("frames.txt")
    ]


FRAMES = golden_frames()
JSON_TYPES = set(FrameType) - {FrameType.DATA, FrameType.EOF}
by_name = pytest.mark.parametrize(
    ("frame", "wire"), [row[1:] for row in FRAMES], ids=[row[0] for row in FRAMES]
)


@by_name
def test_golden_frame_is_encoded_to_the_byte(frame: Frame, wire: bytes) -> None:
    assert encode(frame) == wire


@by_name
def test_golden_frame_is_decoded(frame: Frame, wire: bytes) -> None:
    assert Decoder().feed(wire) == [frame]


@by_name
def test_golden_frame_arrives_byte_by_byte(frame: Frame, wire: bytes) -> None:
    decoder = Decoder()
    for byte in wire[:-1]:
        assert decoder.feed(bytes([byte])) == []
    assert decoder.feed(wire[-1:]) == [frame]
    assert decoder.buffered == 0


@pytest.mark.parametrize(
    "frame", [row[1] for row in FRAMES if row[1].type in JSON_TYPES], ids=lambda f: f.type.name
)
def test_golden_json_can_be_read_and_said_again(frame: Frame) -> None:
    value = load(frame.payload)
    assert load(dump(value)) == value


def test_golden_frames_cover_every_type() -> None:
    assert {row[1].type for row in FRAMES} == set(FrameType)


def test_all_golden_frames_in_one_piece() -> None:
    wire = b"".join(row[2] for row in FRAMES)
    assert Decoder().feed(wire) == [row[1] for row in FRAMES]


@pytest.mark.parametrize("row", list(rows("headers.txt")), ids=lambda row: str(row[0]))
def test_golden_headers(row: list[str]) -> None:
    _, header, length, kind, stream, offset, verdict = row
    decoder = Decoder()
    if verdict == "bad":
        with pytest.raises(ProtocolError):
            decoder.feed(unhex(header))
    else:
        payload = bytes(int(length))
        whole = Frame(FrameType(int(kind)), int(stream), int(offset), payload)
        assert decoder.feed(unhex(header)) == ([] if payload else [whole])
        assert decoder.feed(payload) == ([whole] if payload else [])


@pytest.mark.parametrize("row", list(rows("strings.txt")), ids=lambda row: str(row[0]))
def test_golden_strings(row: list[str]) -> None:
    _, text, expected = row
    payload = b'{"s":' + unhex(text) + b"}"
    if expected in ("bad", "strict"):
        with pytest.raises(ProtocolError):
            load(payload)
    else:
        value = load(payload)["s"]
        assert value.encode("utf-8", "surrogateescape") == unhex(expected)
        assert json.loads(dump({"s": value})) == {"s": value}


def test_a_frame_too_large_is_refused_before_its_payload_is_awaited() -> None:
    with pytest.raises(ProtocolError, match="limit 1048576"):
        Decoder().feed(HEADER.pack(MAX_PAYLOAD + 1, FrameType.DATA, 1, 0, 0))


def test_we_do_not_send_what_the_agent_would_refuse() -> None:
    with pytest.raises(TooLargeError):
        pack(FrameType.DATA, bytes(MAX_PAYLOAD + 1))


def test_a_broken_stream_stays_broken() -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError):
        decoder.feed(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(ProtocolError):
        decoder.feed(pack(FrameType.REPLY, b"{}"))
    assert decoder.buffered <= HEADER_SIZE + 2


def test_frames_before_the_garbage_are_not_lost() -> None:
    decoder = Decoder()
    decoder.push(pack(FrameType.REPLY, b"{}") + b"\xff" * 16)
    assert decoder.pop() == Frame(FrameType.REPLY, payload=b"{}")
    with pytest.raises(ProtocolError):
        decoder.pop()


def test_raw_bytes_after_the_last_frame_are_handed_over() -> None:
    decoder = Decoder()
    decoder.push(pack(FrameType.REPLY, b"{}")[:5])
    assert decoder.pop() is None
    decoder.push(pack(FrameType.REPLY, b"{}")[5:] + b"\xff\xff\xff\xff raw")
    assert decoder.pop() == Frame(FrameType.REPLY, payload=b"{}")
    assert decoder.rest() == b"\xff\xff\xff\xff raw"
    assert decoder.rest() == b""


def test_a_slow_drip_is_not_copied_again_and_again() -> None:
    """One byte at a time, the largest frame: quadratic work would take minutes."""
    decoder = Decoder()
    decoder.push(HEADER.pack(MAX_PAYLOAD, FrameType.DATA, 1, 0, 0))
    for _ in range(MAX_PAYLOAD):
        assert decoder.pop() is None
        decoder.push(b"x")
    frame = decoder.pop()
    assert frame is not None and len(frame.payload) == MAX_PAYLOAD


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"{",
        b"{}x",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":"\\u0041","b":' + b"[" * 900 + b"]" * 900 + b"}" + b" " * 8 + b"x",
        b'{"a":' + b"1" * 5_000 + b"}",
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\x00}\x00",
    ],
)
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        load(payload)


@pytest.mark.parametrize("text", ["\ud800", "a\udc7f", "\udd00b", "\ud83d\udcff"])
def test_a_surrogate_that_is_no_byte_is_an_invalid_request(text: str) -> None:
    with pytest.raises(InvalidError, match=r"lone surrogate: U\+D"):
        dump({"path": text})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_has_not_are_an_invalid_request(value: float) -> None:
    for body in ({"timeout": value}, {"a": [value]}, {"a": [1, value]}, [value], value):
        with pytest.raises(InvalidError):
            dump(body)


@pytest.mark.parametrize("text", ["/dev/null", "null", ":null", "[null,", "x,null"])
def test_the_word_null_is_no_number(text: str) -> None:
    body = {"from": text, text: [text, None], "none": None}
    assert load(dump(body)) == body


frames = st.builds(
    Frame,
    type=st.sampled_from(FrameType),
    stream=st.integers(0, 255),
    offset=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.lists(frames, max_size=8), st.data())
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    sent: list[Frame], data: st.DataObject
) -> None:
    wire = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    decoder = Decoder()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        received += decoder.feed(wire[start:end])
    assert received == sent
    assert decoder.buffered == 0


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_arbitrary_bytes_are_frames_or_a_protocol_error(chunks: list[bytes]) -> None:
    decoder = Decoder()
    try:
        for chunk in chunks:
            for frame in decoder.feed(chunk):
                assert frame.type in FrameType
    except ProtocolError:
        pass


@given(st.binary(max_size=60), st.integers(0, 60), frames)
def test_a_flipped_frame_is_another_frame_or_a_protocol_error(
    noise: bytes, at: int, frame: Frame
) -> None:
    wire = bytearray(encode(frame))
    wire[at : at + len(noise)] = noise
    decoder = Decoder()
    try:
        decoder.feed(bytes(wire))
        decoder.feed(bytes(1000))
    except ProtocolError:
        pass


@given(st.binary(max_size=300))
def test_arbitrary_payloads_are_objects_or_a_protocol_error(payload: bytes) -> None:
    try:
        assert isinstance(load(payload), dict)
    except ProtocolError:
        pass


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_json_survives_the_round_trip(value: dict[str, Any]) -> None:
    try:
        payload = dump(value)
    except InvalidError:
        return
    assert load(payload) == value


@given(st.binary(max_size=200))
def test_every_name_linux_allows_survives_the_round_trip(name: bytes) -> None:
    text = name.decode("utf-8", "surrogateescape")
    sent = load(dump({"path": text}))["path"]
    assert sent.encode("utf-8", "surrogateescape") == name


def test_protocol_errors_tell_the_caller_what_any_unavailable_agent_tells() -> None:
    assert issubclass(ProtocolError, CapsuleError)
    assert ProtocolError.code == "unavailable"


def test_golden_files_are_plain_for_a_c_parser() -> None:
    for path in sorted(Path(GOLDEN).glob("*.txt")):
        assert path.read_bytes().isascii()
        assert max(map(len, path.read_text().splitlines())) < 4096
