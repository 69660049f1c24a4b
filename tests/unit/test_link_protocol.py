"""Frames: against the golden files and against any bytes; and what the agent's errors mean."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.errors import (
    ALL_ERRORS,
    CapsuleError,
    InternalError,
    InvalidError,
    TooLargeError,
)
from capsule.link.errors_map import AGENT_ERRORS, to_error
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


@pytest.mark.parametrize("row", list(rows("frames.txt")), ids=lambda row: str(row[0]))
def test_golden_frames(row: list[str]) -> None:
    _, kind, stream, offset, payload, expected = row
    frame = Frame(FrameType(int(kind)), int(stream), int(offset), unhex(payload))
    wire = unhex(expected)
    assert encode(frame) == wire
    decoder = Decoder()
    for byte in wire[:-1]:
        assert decoder.feed(bytes([byte])) == []
    assert decoder.feed(wire[-1:]) == [frame]
    assert decoder.buffered == 0
    if frame.type not in (FrameType.DATA, FrameType.EOF):
        assert load(dump(load(frame.payload))) == load(frame.payload)


def test_golden_frames_cover_every_type() -> None:
    assert {FrameType(int(row[1])) for row in rows("frames.txt")} == set(FrameType)


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


def test_a_frame_too_large_is_neither_awaited_nor_sent() -> None:
    with pytest.raises(ProtocolError, match="limit 1048576"):
        Decoder().feed(HEADER.pack(MAX_PAYLOAD + 1, FrameType.DATA, 1, 0, 0))
    with pytest.raises(TooLargeError):
        pack(FrameType.DATA, bytes(MAX_PAYLOAD + 1))


def test_garbage_after_a_frame_breaks_the_stream_for_good() -> None:
    decoder = Decoder()
    decoder.push(pack(FrameType.REPLY, b"{}") + b"HTTP/1.1 400 Bad Request\r\n")
    assert decoder.pop() == Frame(FrameType.REPLY, payload=b"{}")
    for _ in range(2):
        with pytest.raises(ProtocolError):
            decoder.feed(pack(FrameType.REPLY, b"{}"))
    assert decoder.buffered <= 2 * HEADER_SIZE + 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"null",
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
    ids=range(13),
)
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        load(payload)


NOT_JSON: list[dict[str, Any]] = [{"timeout": number} for number in (float("nan"), float("inf"))]
NOT_JSON += [{"path": text} for text in ("\ud800", "a\udc7f", "\ud83d\udcff")]


@pytest.mark.parametrize("body", NOT_JSON, ids=ascii)
def test_what_json_cannot_say_is_an_invalid_request(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        dump(body)
    with pytest.raises(InvalidError):
        dump({"a": [None, *body.values(), "null"]})


frames = st.builds(
    Frame,
    type=st.sampled_from(FrameType),
    stream=st.integers(0, 255),
    offset=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
)


@settings(max_examples=40)
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


def documented_codes() -> set[str]:
    text = (ROOT / "spec" / "agent-protocol.md").read_text()
    section = text.split("## Errors")[1].split("`errno`")[0]
    return set(re.findall(r"`([a-z_]+)`", section)) - {"code"}


def test_every_documented_code_has_a_meaning_and_no_other() -> None:
    assert set(AGENT_ERRORS) == documented_codes()


@pytest.mark.parametrize("code", sorted(AGENT_ERRORS))
def test_each_code_becomes_its_error(code: str) -> None:
    error = to_error({"code": code, "message": "open: a", "stage": "open", "errno": 13}, path="a")
    assert type(error) is AGENT_ERRORS[code]
    assert type(error) in ALL_ERRORS
    assert error.message == "open: a"
    assert error.details.items() >= {
        "cause": code, "stage": "open", "errno": "EACCES", "path": "a"
    }.items()  # fmt: skip


json_scalars = st.none() | st.integers() | st.text() | st.lists(st.text()) | st.booleans()


@given(st.dictionaries(st.sampled_from(["code", "message", "stage", "errno"]), json_scalars))
def test_whatever_the_agent_sends_it_is_one_of_our_errors(body: dict[str, object]) -> None:
    error = to_error(body, path="x")
    known = {None, *AGENT_ERRORS} & {code for code in [body.get("code")] if isinstance(code, str)}
    assert isinstance(error, CapsuleError if known else InternalError)
    json.dumps(error.to_json(), ensure_ascii=False).encode()
