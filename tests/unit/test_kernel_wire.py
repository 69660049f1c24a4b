"""The server's end of a kernel's wire: output and messages told apart, and nothing believed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from capsule.service.kernel_wire import (
    MAX_JSON,
    MAX_MESSAGE,
    MAX_PAYLOAD,
    Dropped,
    Ended,
    Raised,
    Said,
    Shown,
    Splitter,
    understand,
)

NONCE = "0123456789abcdef"
MARKER = b"\0" + NONCE.encode()


def chunk(flag: str, payload: bytes) -> bytes:
    return MARKER + b"%s%04x" % (flag.encode(), len(payload)) + payload


def message(body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = [data[at : at + MAX_PAYLOAD] for at in range(0, len(data), MAX_PAYLOAD)]
    if len(pieces) == 1:
        return chunk("S", data)
    flags = ["B", *"M" * (len(pieces) - 2), "E"]
    return b"".join(chunk(flag, piece) for flag, piece in zip(flags, pieces, strict=True))


def split(*pieces: bytes) -> list[Said]:
    splitter = Splitter(NONCE)
    said = [each for piece in pieces for each in splitter.feed(piece)]
    said += splitter.finish()
    whole: list[Said] = []
    for each in said:
        if isinstance(each, bytes) and whole and isinstance(whole[-1], bytes):
            whole[-1] += each
        else:
            whole.append(each)
    return whole


def test_a_message_of_many_chunks_with_output_in_between() -> None:
    text = "x" * 10_000
    data = message({"k": "error", "name": "E", "value": text})
    first = data.index(MARKER, 1)
    assert split(data[:first], b"in between", data[first:]) == [b"in between", Raised("E", text)]


@given(st.lists(st.binary(max_size=60), max_size=6), st.integers(1, 40))
@example([b"\0", MARKER, MARKER + b"S00", b"\0012"], 1)
def test_however_it_is_cut_nothing_is_lost_or_invented(texts: list[bytes], size: int) -> None:
    """Output that holds no marker comes out as it went in, between the messages that were sent."""
    data = b""
    expected: list[Said] = []
    for number, text in enumerate(texts):
        text = text.replace(MARKER, b"")
        data += text + message({"k": "end", "run": number, "status": "ok"})
        expected += [text, Ended(number, "ok")] if text else [Ended(number, "ok")]
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert split(*pieces) == expected


parts = st.one_of(
    st.binary(max_size=30),
    st.sampled_from([MARKER, MARKER + b"S", MARKER + b"Sffff", MARKER + b"M0001", b"\0", b"{}"]),
    st.builds(chunk, st.sampled_from("SBME"), st.binary(max_size=40)),
    st.builds(
        lambda body: message({"k": "result", **body}),
        st.dictionaries(
            st.sampled_from(["run", "main", "text", "png", "json", "data", "errors"]),
            st.one_of(st.none(), st.booleans(), st.text(max_size=5), st.lists(st.integers())),
        ),
    ),
)


@given(st.lists(parts, max_size=12), st.integers(1, 64))
def test_no_input_raises(pieces: list[bytes], size: int) -> None:
    data = b"".join(pieces)
    splitter = Splitter(NONCE)
    for at in range(0, len(data), size):
        for said in splitter.feed(data[at : at + size]):
            msgspec.json.encode(said)  # whatever it is, a client can be told
    list(splitter.gap())
    assert list(splitter.feed(b"plain")) == [b"plain"]


def test_what_is_no_message_is_dropped() -> None:
    for bad in (b"{", b"[]", b'{"k":"none"}', b'{"k":"end"}', b'{"k":"end","run":"x"}', b"\xff"):
        assert split(chunk("S", bad)) == [Dropped()]


def test_a_message_that_is_too_large_is_dropped_and_not_kept() -> None:
    splitter = Splitter(NONCE)
    piece = b"x" * MAX_PAYLOAD
    assert list(splitter.feed(chunk("B", piece))) == []
    for _ in range(MAX_MESSAGE // MAX_PAYLOAD + 2):
        assert list(splitter.feed(chunk("M", piece))) == []
    assert sum(map(len, splitter._parts)) <= MAX_PAYLOAD
    assert list(splitter.feed(chunk("E", b"") + b"on")) == [Dropped(), b"on"]


def test_a_gap_drops_what_was_cut() -> None:
    splitter = Splitter(NONCE)
    assert list(splitter.feed(chunk("B", b'{"k":'))) == []
    assert list(splitter.gap()) == [Dropped()]
    rest = chunk("E", b'"x"}') + message({"k": "end", "run": 3, "status": "ok"})
    assert list(splitter.feed(b"tail of a chunk" + rest)) == [b"tail of a chunk", Ended(3, "ok")]


def test_json_forms_have_a_size_and_a_depth() -> None:
    def shown(value: bytes) -> object:
        return understand(b'{"k":"result","main":true,"json":' + value + b"}")

    assert isinstance(shown(b"[" * 60 + b"]" * 60), Shown)
    assert shown(b"[" * 70 + b"]" * 70) == Dropped()
    assert shown(b"[" * 100_000 + b"]" * 100_000) == Dropped()
    assert shown(b'"' + b"x" * MAX_JSON + b'"') == Dropped()
    assert shown(b"NaN") == Dropped()
