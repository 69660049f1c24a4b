"""How errors look from outside, whatever raised them."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from capsule.edge.errors import http_body, understand
from capsule.errors import ALL_ERRORS, CapacityError, CapsuleError, InternalError
from tests.api.double import Running, ServiceDouble, serving

CREATE = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.create"}


async def both(server: Running) -> tuple[httpx.Response, httpx.Response]:
    """The same failing create over REST and JSON-RPC."""
    async with httpx.AsyncClient(base_url=server.url) as client:
        return await client.post("/v1/sandboxes"), await client.post("/rpc", json=CREATE)


@pytest.mark.parametrize("kind", ALL_ERRORS)
async def test_every_error_has_one_shape(kind: type[CapsuleError]) -> None:
    service = ServiceDouble()
    service.failure = kind("what failed: 7, limit 5", hint="try 5", limit=5)
    async with serving(service) as server:
        rest, rpc = await both(server)
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
    service = ServiceDouble()
    service.failure = CapacityError("too many sandboxes: 3, limit 3", retry_after=2.5)
    async with serving(service) as server:
        rest, rpc = await both(server)
    assert rest.status_code == 429
    assert rest.headers["retry-after"] == "3"
    assert rest.json()["error"]["details"]["retry_after"] == 2.5
    assert rpc.headers["retry-after"] == "3"


async def test_a_bug_is_logged_with_an_id_and_says_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = ServiceDouble()
    service.failure = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR):
        async with serving(service) as server:
            rest, rpc = await both(server)
    assert rest.status_code == 500
    assert "secret" not in rest.text + rpc.text
    assert rest.json()["error"]["details"]["incident"] in caplog.text
    assert rpc.json()["error"]["code"] == InternalError.rpc_code
    assert rpc.json()["error"]["data"]["details"]["incident"] in caplog.text


async def test_unknown_paths_and_methods_are_json_too() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        missing = await client.get("/v2/nothing")
        wrong = await client.put("/health")
        rpc = await client.get("/rpc")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "invalid")
    assert (rpc.status_code, rpc.json()["error"]["code"]) == (405, "invalid")


def test_an_error_with_a_name_that_is_no_text_can_still_be_told() -> None:
    body: Any = json.loads(http_body(CapsuleError("no such file: \udcff", path="\udcff")))
    assert body["error"]["message"] == "no such file: \\udcff"
    assert body["error"]["details"]["path"] == "�"


def test_a_line_break_in_a_name_does_not_break_the_message() -> None:
    body: Any = json.loads(http_body(CapsuleError("no such file: a\n\x1b[31mb", hint="x\ty")))
    assert body["error"]["message"] == r"no such file: a\n\x1b[31mb"
    assert body["error"]["hint"] == r"x\ty"


def test_errors_of_ours_are_passed_on_as_they_are() -> None:
    error = CapacityError("full")
    assert understand(error) is error
