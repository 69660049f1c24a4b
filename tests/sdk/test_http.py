"""The HTTP client of unary calls: every shape of answer, and stale connections."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_sdk import CapsuleClient, UnavailableError, WrongStateError
from capsule_sdk._http import BrokenAnswer, Parser, encode
from tests.sdk.crooked import Request, crooked_server, result
from tests.sdk.test_rpc import SANDBOX
from tests.support import free_port

COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name: v\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + COUNTED
UNTIL_THE_END = b"HTTP/1.0 200 OK\r\n\r\nhello"


@given(st.sampled_from([COUNTED, CHUNKED, CONTINUED]), st.lists(st.integers(1, 30), max_size=12))
def test_an_answer_is_the_same_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    parser, done = Parser(), False
    for cut in cuts:
        piece, data = data[:cut], data[cut:]
        if piece:
            done = parser.feed(piece)
    done = parser.feed(data) if data else done
    assert done
    assert (parser.answer.status, parser.answer.body) == (200, b"hello")
    assert parser.reusable


def test_an_answer_without_a_length_goes_to_the_end() -> None:
    parser = Parser()
    assert not parser.feed(UNTIL_THE_END)
    assert parser.feed(b"")
    assert parser.answer.body == b"hello"
    assert not parser.reusable


@pytest.mark.parametrize("data", [COUNTED, CHUNKED])
def test_an_answer_that_breaks_off_is_never_taken_for_whole(data: bytes) -> None:
    for end in range(len(data) - 1):
        parser = Parser()
        if end:
            assert not parser.feed(data[:end])
        with pytest.raises(BrokenAnswer):
            parser.feed(b"")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-6\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1_0\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 \xb2\xb2\xb2\r\n\r\n",
        b"x" * 70_000,
    ],
)
def test_nonsense_is_an_error(data: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        Parser().feed(data)


def test_a_closed_client_is_an_error() -> None:
    with crooked_server(result(SANDBOX)) as server:
        with CapsuleClient(server.url) as client:
            capsule = client.get("abc12345")
        client.close()
        calls: list[Callable[[], Any]] = [
            client.list,
            lambda: capsule.run("pass"),
            lambda: list(capsule.stream(["true"])),
            lambda: list(capsule.read_stream("f")),
        ]
        for call in calls:
            with pytest.raises(WrongStateError, match="closed"):
                call()
        assert len(server.requests) == 1


def test_a_header_cannot_bring_another_one_along() -> None:
    with pytest.raises(ValueError, match="line break"):
        encode("GET", "/", {"Authorization": "Bearer x\r\nX-Evil: 1"}, b"")


def test_calls_share_one_connection() -> None:
    with crooked_server(*[result(SANDBOX)] * 5) as server:
        client = CapsuleClient(server.url)
        for _ in range(5):
            client.get("x")
        assert len(server.connections) == 1


def answer_and_close(connection: socket.socket, request: Request) -> bool:
    result(SANDBOX)(connection, request)
    return False


def test_a_fork_has_connections_of_its_own() -> None:
    forks = (
        "import os, sys; from capsule_sdk import CapsuleClient\n"
        "client = CapsuleClient(sys.argv[1]); client.get('x')\n"
        "child = os.fork(); client.get('x')\n"
        "child and os.waitpid(child, 0)"
    )
    with crooked_server(*[result(SANDBOX)] * 3) as server:
        subprocess.run([sys.executable, "-c", forks, server.url], check=True, timeout=20)
        assert len(server.requests) == 3
        assert len(server.connections) == 2


def test_a_connection_the_server_closed_meanwhile_is_not_used() -> None:
    with crooked_server(answer_and_close, result(SANDBOX)) as server:
        client = CapsuleClient(server.url, retries=0)
        client.get("x")
        server.threads[1].join(5)  # the server has hung up
        assert client.get("x").id == SANDBOX["id"]


def test_a_password_in_the_address_is_not_shown() -> None:
    url = f"http://user:secret@127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError) as caught:
        CapsuleClient(url, retries=0).list()
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_a_proxy_of_the_environment_is_used_for_others_but_not_for_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    assert CapsuleClient("http://example.test")._driver._lines is None
    assert CapsuleClient("http://127.0.0.1:1")._driver._lines is not None
