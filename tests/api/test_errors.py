"""How errors look from outside, whatever raised them."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from capsule.edge.errors import http_body
from capsule.edge.sockets import close_code
from capsule.errors import ALL_ERRORS, CapacityError, CapsuleError, InternalError
from tests.api.double import Running, borrowed

CREATE = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.create"}


async def both(server: Running, failure: Exception) -> tuple[httpx.Response, httpx.Response]:
    """The same failing create over REST and JSON-RPC."""
    server.service.failure = failure
    async with httpx.AsyncClient(verify=False, base_url=server.url) as client:
        return await client.post("/v1/sandboxes"), await client.post("/rpc", json=CREATE)


@pytest.mark.parametrize("kind", ALL_ERRORS)
async def test_every_error_has_one_shape(kind: type[CapsuleError]) -> None:
    failure = kind("what failed: 7, limit 5", hint="try 5", limit=5)
    async with borrowed() as server:
        rest, rpc = await both(server, failure)
    error = rest.json()["error"]
    assert rest.status_code == kind.http_status
    assert error["code"] == kind.code
    assert error["message"] == "what failed: 7, limit 5"
    assert error["hint"] == "try 5"
    assert error["details"]["limit"] == 5
    assert rpc.status_code == 200
    assert rpc.json()["error"] == {
        "code": kind.rpc_code,
        "message": "what failed: 7, limit 5",
        "data": error,
    }


async def test_a_full_server_says_when_to_come_back() -> None:
    failure = CapacityError("too many sandboxes: 3, limit 3", retry_after=2.5)
    async with borrowed() as server:
        rest, rpc = await both(server, failure)
    assert rest.status_code == 429
    assert rest.headers["retry-after"] == "3"
    assert rest.json()["error"]["details"]["retry_after"] == 2.5
    assert rpc.headers["retry-after"] == "3"


async def test_a_bug_is_logged_and_the_answer_has_its_id_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failure = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR):
        async with borrowed() as server:
            rest, rpc = await both(server, failure)
    assert rest.status_code == 500
    assert "secret" not in rest.text + rpc.text
    assert rest.json()["error"]["details"]["incident"] in caplog.text
    assert rpc.json()["error"]["code"] == InternalError.rpc_code
    assert rpc.json()["error"]["data"]["details"]["incident"] in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/rpc", {"POST"}),
        ("POST", "/docs", {"GET", "HEAD"}),
        ("PUT", "/v1/sandboxes/x", {"GET", "PATCH", "DELETE"}),
        ("POST", "/v1/sandboxes/x/files/a/b", {"GET", "HEAD", "PUT", "PATCH", "DELETE"}),
        ("OPTIONS", "/v1/sandboxes/x/execs", {"GET", "POST"}),
    ],
)
async def test_a_wrong_method_is_answered_with_the_right_ones(
    method: str, path: str, allowed: set[str]
) -> None:
    async with borrowed() as server, httpx.AsyncClient(verify=False, base_url=server.url) as client:
        answer = await client.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert answer.json()["error"]["code"] == "invalid"
    assert answer.headers["allow"] in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/terminals/x", "/rpc"])
async def test_a_websocket_where_there_is_none_is_a_404_with_a_hint(path: str) -> None:
    async with borrowed() as server:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://127.0.0.1:{server.port}{path}", proxy=None):
                pass
    error = json.loads(refused.value.response.body or b"")["error"]
    assert refused.value.response.status_code == 404
    assert error["code"] == "not_found"
    assert path in error["message"]
    assert "/terminal/{id}" in error["hint"]


async def test_other_paths_have_json_errors_too() -> None:
    async with borrowed() as server, httpx.AsyncClient(verify=False, base_url=server.url) as client:
        missing = await client.get("/v9/nothing")
        answer = await client.get("/terminal/x")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"
    assert "/v9/nothing" in missing.json()["error"]["message"]
    assert answer.status_code == 426
    assert answer.headers["upgrade"] == "websocket"
    assert "WebSocket" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_a_socket_is_closed_as_our_fault_only_when_it_is(kind: type[CapsuleError]) -> None:
    assert (close_code(kind("what failed")) == 1011) == (kind.http_status >= 500)


def test_odd_characters_in_a_name_are_escaped() -> None:
    odd = CapsuleError("no such file: \udcff\n\x1b[31mb", hint="x\ty", path="\udcff")
    body: Any = json.loads(http_body(odd))
    assert body["error"]["message"] == r"no such file: \udcff\n\x1b[31mb"
    assert (body["error"]["hint"], body["error"]["details"]["path"]) == (r"x\ty", "�")
