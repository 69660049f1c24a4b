"""Output over dropped connections: every byte once, no character split."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_sdk import CapsuleClient, Exit, Gap, Output, UnavailableError
from capsule_sdk._follow import Joiner
from capsule_sdk._sse import Decoder
from tests.sdk.crooked import crooked_server, events, hang_up, result
from tests.sdk.test_rpc import SANDBOX

BEGUN = {"exec_id": "e1", "pid": 2}
EXIT = {"exit_code": 0, "timed_out": False, "duration_ms": 5, "reason": "exited", "signal": 0}


def event(name: str, body: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(body)}\n\n".encode()


STARTED = event("started", BEGUN)


def output(stream: str, offset: int, data: bytes) -> bytes:
    return event(stream, {"offset": offset, "data": base64.b64encode(data).decode()})


def read_all(url: str) -> list[Any]:
    return list(CapsuleClient(url).get("abc12345").stream(["true"]))


def test_a_dropped_stream_is_resumed_at_its_offset() -> None:
    cut = events(
        STARTED, output("stdout", 0, b"abc"), output("stderr", 0, b"x"), b"event: stdout\ndata: {"
    )
    rest = events(output("stdout", 3, b"def"), event("exit", EXIT))
    with crooked_server(result(SANDBOX), cut, hang_up, rest) as server:
        said = read_all(server.url)
        paths = [request.path for request in server.requests[1:]]
    assert b"".join(e.data for e in said if isinstance(e, Output)) == b"abcxdef"
    assert paths[0] == "/v1/sandboxes/abc12345/execs"
    assert paths[-1].endswith("/execs/e1/stream?encoding=base64&stdout=3&stderr=1")


def test_a_start_whose_answer_is_lost_is_repeated_with_its_key() -> None:
    said = events(STARTED, event("exit", EXIT))
    with crooked_server(result(SANDBOX), hang_up, said) as server:
        assert len(read_all(server.url)) == 1
        keys = [request.json["idempotency_key"] for request in server.requests[1:]]
    assert keys[0] == keys[1]


def test_bytes_that_come_again_are_dropped() -> None:
    cut = events(STARTED, output("stdout", 0, b"abc"))
    again = events(output("stdout", 0, b"abcdef"), event("exit", EXIT))
    with crooked_server(result(SANDBOX), cut, again) as server:
        said = read_all(server.url)
    assert [e.data for e in said if isinstance(e, Output)] == [b"abc", b"def"]


def test_bytes_that_are_no_longer_kept_are_a_gap() -> None:
    said = events(
        STARTED,
        output("stdout", 0, b"ab"),
        event("gap", {"stream": "stdout", "start": 2, "end": 9}),
        output("stdout", 9, b"z"),
        event("exit", EXIT),
    )
    with crooked_server(result(SANDBOX), said) as server:
        first, gap, second, last = read_all(server.url)
    assert (first, gap) == (Output("stdout", 0, b"ab"), Gap("stdout", 2, 9))
    assert second == Output("stdout", 9, b"z")
    assert isinstance(last, Exit) and last.ok


def test_a_character_is_never_split_even_across_connections() -> None:
    euro = "€".encode()
    cut = events(STARTED, output("stdout", 0, b"5" + euro[:2]))
    rest = events(output("stdout", 3, euro[2:] + b"!"), event("exit", EXIT))
    with crooked_server(result(SANDBOX), cut, rest) as server:
        said = [e for e in read_all(server.url) if isinstance(e, Output)]
    assert [e.text for e in said] == ["5", "€!"]
    assert said[1].offset == 1


def test_an_end_without_an_exit_is_an_error_and_never_an_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("capsule_sdk._follow.RECONNECT_WAITS", (0.0, 0.01))
    with crooked_server(result(SANDBOX), events(STARTED, output("stdout", 0, b"a"))) as server:
        with pytest.raises(UnavailableError):
            read_all(server.url)


def test_wait_gives_the_result_with_all_output() -> None:
    said = events(output("stdout", 0, b"out"), output("stderr", 0, b"err"), event("exit", EXIT))
    with crooked_server(result(SANDBOX), result(BEGUN), said) as server:
        finished = CapsuleClient(server.url).get("abc12345").start("x").wait()
    assert (finished.stdout, finished.stderr, finished.ok) == ("out", "err", True)


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_joining_pieces_gives_the_same_bytes(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    joiner = Joiner("stdout")
    heard: list[Any] = []
    for start, end in itertools.pairwise(edges):
        heard += joiner.feed(start, data[start:end])
    heard += joiner.flush()
    assert b"".join(piece.data for piece in heard) == data
    assert all(data[p.offset : p.offset + len(p.data)] == p.data for p in heard)


@given(st.lists(st.integers(1, 40), max_size=8))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    stream = b": beat\n\nid: 1-0\nevent: stdout\r\ndata: {}\r\n\r\ndata: a\ndata: b\n\n"
    decoder, heard, rest = Decoder(), [], stream
    for cut in cuts:
        heard += decoder.feed(rest[:cut])
        rest = rest[cut:]
    heard += decoder.feed(rest)
    assert [(e.event, e.data) for e in heard] == [("stdout", "{}"), ("message", "a\nb")]
