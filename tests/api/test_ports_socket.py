"""WebSockets to what listens in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from tests.api.client import Api
from tests.support import eventually
from tests.support.ports import by_header, by_name, sandbox, start_app
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def app(server: RealServer) -> Iterator[str]:
    with sandbox(server.url) as id:
        start_app(server.url, id)
        yield id


@asynccontextmanager
async def joined(
    server: RealServer, app: str, *protocols: str, path: str = "/socket", **headers: str
) -> AsyncIterator[tuple[ClientConnection, dict[str, Any]]]:
    """A WebSocket, and what the program was shown of the request for it."""
    async with connect(
        f"ws://3000-{app}.localhost:{server.port}{path}",
        host="127.0.0.1",
        subprotocols=[Subprotocol(p) for p in protocols] or None,
        additional_headers=headers,
        max_size=None,
        proxy=None,
    ) as ws:
        yield ws, json.loads(await ws.recv())


async def test_messages_go_both_ways_and_keep_their_kind(server: RealServer, app: str) -> None:
    async with joined(server, app) as (ws, _):
        for message in ("text ü", b"\x00\xff", "", b""):
            await ws.send(message)
            assert await ws.recv() == message


async def test_by_header_too(server: RealServer, app: str) -> None:
    url = f"ws://127.0.0.1:{server.port}/socket"
    async with connect(url, additional_headers=by_header(app), proxy=None) as ws:
        assert json.loads(await ws.recv())["target"] == "/socket"


async def test_large_messages_and_parts_pass(server: RealServer, app: str) -> None:
    async with joined(server, app) as (ws, _):
        large = os.urandom(3_000_000)  # our own sockets take less
        await ws.send(large)
        assert await ws.recv() == large
        await ws.send("parts")
        assert await ws.recv() == "one two"


async def test_the_request_is_shown_as_any_other(server: RealServer, app: str) -> None:
    shown = {"Origin": "https://elsewhere.example", "Cookie": "a=1", "E2b-Secret": "1"}
    async with joined(server, app, path="/socket?q=%20", **shown) as (ws, told):
        headers = {name.lower(): value for name, value in told["headers"]}
        assert told["target"] == "/socket?q=%20"
        assert headers["host"] == f"3000-{app}.localhost:{server.port}"
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert (headers["origin"], headers["cookie"]) == ("https://elsewhere.example", "a=1")
        assert "e2b-secret" not in headers
        assert ws.response is not None and ws.response.headers["x-of-app"] == "yes"


async def test_the_subprotocol_is_the_programs_choice(server: RealServer, app: str) -> None:
    async with joined(server, app, "chat", "superchat", "capsule.key.c2VjcmV0") as (ws, told):
        assert told["offered"] == ["chat", "superchat"]
        assert ws.subprotocol == "superchat"


@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1001, "away"), (4321, "own words ü")])
async def test_a_close_passes_with_code_and_reason(
    server: RealServer, app: str, code: int, reason: str
) -> None:
    async with joined(server, app) as (ws, _):
        await ws.send(f"close {code}{reason}")
        with pytest.raises(ConnectionClosed):
            await ws.recv()
        assert (ws.close_code, ws.close_reason) == (code, reason)


async def test_the_clients_close_reaches_the_program(
    server: RealServer, app: str, api: Api
) -> None:
    async with joined(server, app) as (ws, _):
        await ws.close(4007, "enough")

    async def told() -> bool:
        return 4007 in (await api.http.get("/closes", headers=by_name(app))).json()

    await eventually(told, what="the program heard of the close")


async def test_a_connection_that_breaks_is_closed(server: RealServer, app: str) -> None:
    async with joined(server, app) as (ws, _):
        await ws.send("drop")
        with pytest.raises(ConnectionClosed):
            await ws.recv()
        assert ws.close_code == 1011


async def test_a_client_that_vanishes_is_gone_inside_too(
    server: RealServer, app: str, api: Api
) -> None:
    async def count() -> int:
        closes = (await api.http.get("/closes", headers=by_name(app))).json()
        left = (await api.http.get("/left", headers=by_name(app))).json()
        return len(closes) + int(left)

    before = await count()
    async with joined(server, app) as (ws, _):
        ws.transport.abort()

    async def gone() -> bool:
        return await count() > before

    await eventually(gone, what="the program's end of the socket closed")


async def test_a_refusal_is_the_programs_own(server: RealServer, app: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with joined(server, app, path="/status?403"):
            pass
    assert refused.value.response.status_code == 403


async def test_what_speaks_no_websocket_says_so(server: RealServer, app: str) -> None:
    wire = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    with pytest.raises(InvalidStatus) as refused:
        async with joined(server, app, path=f"/raw?{wire.hex()}"):
            pass
    assert refused.value.response.status_code == 502


async def test_a_closed_port_refuses_the_handshake(server: RealServer, app: str) -> None:
    url = f"ws://3999-{app}.localhost:{server.port}/"
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, host="127.0.0.1", proxy=None):
            pass
    assert refused.value.response.status_code == 502
    assert b"port is not open" in bytes(refused.value.response.body or b"")


async def test_deleting_the_sandbox_ends_its_sockets(server: RealServer) -> None:
    with sandbox(server.url) as id:
        start_app(server.url, id)
        async with joined(server, id) as (ws, _), asyncio.timeout(10):
            async with httpx.AsyncClient(base_url=server.url) as http:
                await http.delete(f"/v1/sandboxes/{id}")
            with pytest.raises(ConnectionClosed):
                await ws.recv()


async def test_a_stopping_server_waits_for_no_endless_stream(agent_binary: object) -> None:
    with real_server(DRAIN_TIMEOUT="10") as server, sandbox(server.url) as id:
        start_app(server.url, id)
        async with (
            joined(server, id) as (ws, _),
            httpx.AsyncClient(base_url=server.url, headers=by_name(id), timeout=15) as http,
            http.stream("GET", "/chunked") as events,
        ):
            lines = events.aiter_lines()
            assert await anext(lines) == 'data: {"n": 1}'
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                await ws.recv()
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]
            assert ws.close_code == 1012
            assert await asyncio.to_thread(server.process.wait, 10) == 0
            assert time.monotonic() - began < 6
        assert "Traceback" not in (server.base / "log").read_text()
