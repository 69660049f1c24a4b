"""What listens in a sandbox, as E2B's SDK has it: addresses, tokens, and what programs are told."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
from e2b import E2B, Sandbox
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.e2b.conftest import parameters
from tests.support.ports import APP
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


def listening(sandbox: Sandbox, port: int = 3000) -> None:
    """Start tests/support/port_app.py and wait until it says that it listens."""
    sandbox.files.write("app.py", APP)
    started = sandbox.commands.run(f"python3 app.py {port}", background=True, timeout=0)
    for out, _, _ in started:
        if out and "listening" in out:
            return
    pytest.fail("the server did not start")


def get(sandbox: Sandbox, place: RealServer, port: int = 3000, **more: str) -> httpx.Response:
    """What a browser gets at `get_host()`."""
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    host = sandbox.get_host(port)
    assert host == f"{port}-{sandbox.sandbox_id}.localhost:{place.port}"
    return httpx.get(f"{place.url}/path?q=1", headers={"host": host, **headers}, timeout=15)


def told(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {name.lower(): value for name, value in answer.json()["headers"]}


def test_a_server_in_a_sandbox_has_an_address(e2b: E2B, place: RealServer) -> None:
    with e2b.Sandbox.create(timeout=120) as sandbox:
        closed = get(sandbox, place)
        assert closed.status_code == 502
        assert closed.json()["message"] == "The sandbox is running but port is not open"
        listening(sandbox)
        assert get(sandbox, place).json()["target"] == "/path?q=1"
        assert told(get(sandbox, place))["host"] == sandbox.get_host(3000)
    gone = get(sandbox, place)
    assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")


def test_a_websocket_in_a_sandbox(e2b: E2B, place: RealServer) -> None:
    with e2b.Sandbox.create(timeout=120) as sandbox:
        listening(sandbox)
        named = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "3000"}
        url = f"ws://127.0.0.1:{place.port}/socket"
        with connect(url, additional_headers=named, max_size=None) as ws:
            assert json.loads(ws.recv())["target"] == "/socket"
            for message in ("text", os.urandom(300_000)):
                ws.send(message)
                assert ws.recv(timeout=15) == message
            ws.send("close 4100enough")
            with pytest.raises(ConnectionClosed):
                ws.recv(timeout=15)
            assert (ws.close_code, ws.close_reason) == (4100, "enough")


def test_one_that_is_not_public_asks_for_its_token(place: RealServer) -> None:
    network = {"allow_public_traffic": False, "mask_request_host": "app.internal:${PORT}"}
    options: Any = parameters(place)
    with Sandbox.create(timeout=120, network=network, **options) as sandbox:  # type: ignore[arg-type]
        listening(sandbox)
        missing = get(sandbox, place)
        assert missing.status_code == 403
        assert missing.json()["message"] == (
            "Sandbox is secured with traffic access token. "
            "Token header 'e2b-traffic-access-token' is missing"
        )
        wrong = get(sandbox, place, e2b_traffic_access_token="ta_wrong")
        assert (wrong.status_code, "is invalid" in wrong.json()["message"]) == (403, True)
        token = sandbox.traffic_access_token
        assert token
        seen = told(get(sandbox, place, e2b_traffic_access_token=token))
        assert seen["host"] == "app.internal:3000"
        assert seen["x-forwarded-host"] == sandbox.get_host(3000)
        assert token not in str(seen)
