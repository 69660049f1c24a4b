"""WebSockets to what listens in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import signal
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
    large = os.urandom(3_000_000)  # the API's own sockets take less
    async with joined(server, app) as (ws, _):
        for message in ("text ü", b"\x00\xff", "", b"", large):
            await ws.send(message)
            assert await ws.recv() == message
        await ws.send("parts")
        assert await ws.recv() == "one two"
    url = f"ws://127.0.0.1:{server.port}/socket"
    async with connect(url, additional_headers=by_header(app), proxy=None) as ws:
        assert json.loads(await ws.recv())["target"] == "/socket"


async def test_the_program_is_shown_the_request_as_any_other(server: RealServer, app: str) -> None:
    shown = {"Origin": "https://elsewhere.example", "Cookie": "a=1", "E2b-Secret": "1"}
    offered = ("chat", "superchat", "capsule.key.c2VjcmV0")
    async with joined(server, app, *offered, path="/socket?q=%20", **shown) as (ws, seen):
        assert (seen["offered"], ws.subprotocol) == (["chat", "superchat"], "superchat")
        headers = {name.lower(): value for name, value in seen["headers"]}
        assert seen["target"] == "/socket?q=%20"
        assert headers["host"] == f"3000-{app}.localhost:{server.port}"
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert (headers["origin"], headers["cookie"]) == ("https://elsewhere.example", "a=1")
        assert "e2b-secret" not in headers
        assert ws.response is not None and ws.response.headers["x-of-app"] == "yes"


@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1001, "away"), (4321, "own words ü")])
async def test_a_close_passes_with_code_and_reason(
    server: RealServer, app: str, code: int, reason: str
) -> None:
    async with joined(server, app) as (ws, _):
        await ws.send(f"close {code}{reason}")
        with pytest.raises(ConnectionClosed):
            await ws.recv()
        assert (ws.close_code, ws.close_reason) == (code, reason)


@pytest.mark.parametrize("code", [4007, None], ids=["closes", "vanishes"])
async def test_a_client_that_leaves_is_gone_inside_too(
    server: RealServer, app: str, api: Api, code: int | None
) -> None:
    async def ends() -> list[int]:
        closes: list[int] = (await api.http.get("/closes", headers=by_name(app))).json()
        left = (await api.http.get("/left", headers=by_name(app))).json()
        return [*closes, *[0] * int(left)]

    before = len(await ends())
    async with joined(server, app) as (ws, _):
        if code:
            await ws.close(code, "enough")
        else:
            ws.transport.abort()

    async def gone() -> bool:
        return len(await ends()) > before and (code is None or code in await ends())

    await eventually(gone, what="the program's end of the socket closed")


async def test_a_program_that_breaks_off_or_refuses(server: RealServer, app: str) -> None:
    async with joined(server, app) as (ws, _):
        await ws.send("drop")
        with pytest.raises(ConnectionClosed):
            await ws.recv()
        assert ws.close_code == 1011
    no_socket = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
    for path, port, status in (
        ("/status?403", 3000, 403),
        (f"/raw?{no_socket.hex()}", 3000, 502),
        ("/", 3999, 502),
    ):
        with pytest.raises(InvalidStatus) as refused:
            async with connect(
                f"ws://{port}-{app}.localhost:{server.port}{path}", host="127.0.0.1", proxy=None
            ):
                pass
        assert refused.value.response.status_code == status, path


async def test_a_stopping_server_waits_for_no_endless_stream() -> None:
    with real_server(DRAIN_TIMEOUT="600") as server, sandbox(server.url) as id:
        start_app(server.url, id)
        async with (
            joined(server, id) as (ws, _),
            httpx.AsyncClient(base_url=server.url, headers=by_name(id), timeout=15) as http,
            http.stream("GET", "/chunked") as events,
        ):
            lines = events.aiter_lines()
            assert await anext(lines) == 'data: {"n": 1}'
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                await ws.recv()
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]
            assert ws.close_code == 1012
            assert await asyncio.to_thread(server.process.wait, 30) == 0
        assert "Traceback" not in (server.base / "log").read_text()
