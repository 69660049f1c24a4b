"""Sizes and times of requests: too large or too slow ends in an answer, not in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from capsule.edge import body, server
from capsule.service import CreateRequest
from tests.api.double import Running, ServiceDouble, borrowed, serving
from tests.support import eventually

MIB = 1024 * 1024
JSON = {"Content-Type": "application/json"}
HEAD = "POST /rpc HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def sent(running: Running, wire: str | bytes) -> bytes:
    """All that comes, until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(wire.encode() if isinstance(wire, str) else wire)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_a_large_body_is_refused() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * MIB

    async with borrowed() as running, httpx.AsyncClient(base_url=running.url) as client:
        whole = await client.post("/rpc", content=b" " * (17 * MIB), headers=JSON)
        assert whole.status_code == 413
        assert whole.json()["error"]["details"] == {"limit": 16 * MIB}
        unknown = await client.post("/rpc", content=endless(), headers=JSON)
        assert unknown.status_code == 413
        # Before any of it was sent.
        assert b" 413 " in (await sent(running, f"{HEAD}Content-Length: 9999999999\r\n\r\n"))[:20]


async def test_large_input_is_refused_with_another_way_in() -> None:
    async with borrowed(max_body=MIB) as running, httpx.AsyncClient(base_url=running.url) as client:
        box = await running.service.create(CreateRequest())
        url = f"/v1/sandboxes/{box.id}/execs/e1/stdin"
        answer = await client.post(url, content=b"x" * (2 * MIB))
    error = answer.json()["error"]
    assert answer.status_code == 413
    assert error["details"] == {"limit": MIB}
    assert str(2 * MIB) in error["message"] and str(MIB) in error["message"]
    assert "several requests" in error["hint"] and "/exec/ws" in error["hint"]


async def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PATIENCE", 0.2)
    monkeypatch.setattr(body, "LINGER", 0.1)
    async with borrowed() as running:
        answer = await sent(running, f"{HEAD}Content-Length: 100\r\n\r\nhalf")
    assert b" 408 " in answer.splitlines()[0]
    assert b"too slow: 4 bytes" in answer and b"32768 bytes every 0.2 seconds" in answer


async def test_headers_that_stop_coming_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_PATIENCE", 0.2)
    async with borrowed() as running:
        assert await sent(running, "POST /rpc HTTP/1.1\r\nHost: loc") == b""


@pytest.mark.parametrize(
    "wire",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + (b"X: " + b"a" * 1000 + b"\r\n") * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    ],
    ids=["endless headers", "no HTTP"],
)
async def test_broken_requests_get_a_400(wire: bytes) -> None:
    async with serving() as running:
        answer = await sent(running, wire)
    assert b" 400 " in answer.splitlines()[0]
    assert b'"code":"invalid"' in answer


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_PATIENCE", 0.3)
    service = ServiceDouble(lambda call: b"x" * 30_000_000)
    async with serving(service) as running:
        box = (await service.create(CreateRequest())).id
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        call = b'{"cmd": ["x"]}'
        head = HEAD.replace("/rpc", f"/v1/sandboxes/{box}/execs")
        writer.write(f"{head}Content-Length: {len(call)}\r\n\r\n".encode() + call)
        assert b" 200 " in await reader.readline()
        connections = running.server.server_state.connections
        await eventually(lambda: not connections, what="the connection is gone")
        writer.transport.abort()
