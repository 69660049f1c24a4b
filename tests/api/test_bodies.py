"""Sizes and times of requests: what is too large or too slow ends in an answer, not in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from capsule.edge import body, server
from capsule.service import CreateRequest
from tests.api.double import ServiceDouble, borrowed, serving
from tests.support import eventually

MIB = 1024 * 1024
JSON = {"Content-Type": "application/json"}


async def test_a_hundred_megabytes_of_json_are_refused() -> None:
    async with borrowed() as running, httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post("/rpc", content=b" " * (100 * MIB), headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["details"] == {"limit": 16 * MIB}


async def test_a_large_body_is_refused_before_it_is_sent() -> None:
    async with borrowed() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        head = "POST /rpc HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 9999999999\r\n\r\n".encode())
        status = await reader.readline()
        writer.close()
    assert b" 413 " in status


async def test_a_body_of_unknown_length_is_refused_once_it_is_too_long() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * MIB

    async with borrowed() as running, httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post("/rpc", content=endless(), headers=JSON)
    assert answer.status_code == 413


async def test_input_that_is_too_large_is_told_the_other_way_in() -> None:
    async with borrowed(max_body=MIB) as running, httpx.AsyncClient(base_url=running.url) as client:
        box = await running.service.create(CreateRequest())
        url = f"/v1/sandboxes/{box.id}/execs/e1/stdin"
        answer = await client.post(url, content=b"x" * (2 * MIB))
    error = answer.json()["error"]
    assert answer.status_code == 413
    assert error["details"] == {"limit": MIB}
    assert str(2 * MIB) in error["message"] and str(MIB) in error["message"]
    assert "several requests" in error["hint"] and "/exec/ws" in error["hint"]


async def test_the_limit_of_input_is_in_the_reference() -> None:
    async with borrowed() as running, httpx.AsyncClient(base_url=running.url) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    about = paths["/v1/sandboxes/{id}/execs/{exec_id}/stdin"]["post"]
    assert "16 MiB" in about["description"] and "max_body" in about["description"]


async def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PATIENCE", 0.2)
    monkeypatch.setattr(body, "LINGER", 0.1)
    async with borrowed() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        head = "POST /rpc HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\nhalf".encode())
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert b" 408 " in answer.splitlines()[0]
    assert b"too slow: 4 bytes" in answer and b"32768 bytes every 0.2 seconds" in answer


async def test_headers_that_stop_coming_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_PATIENCE", 0.2)
    async with borrowed() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST /rpc HTTP/1.1\r\nHost: loc")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_endless_headers_are_refused() -> None:
    async with serving() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        for i in range(100):
            writer.write(b"X-%d: " % i + b"a" * 1000 + b"\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert b" 400 " in answer.splitlines()[0]


async def test_what_is_no_http_gets_a_400() -> None:
    async with borrowed() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert b" 400 " in answer.splitlines()[0]
    assert b'"code":"invalid"' in answer


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with borrowed() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for _ in range(3):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.splitlines()[0]
            assert await reader.readexactly(15) == b'{"status":"ok"}'
        writer.close()


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_PATIENCE", 0.3)
    service = ServiceDouble(lambda call: b"x" * 30_000_000)
    async with serving(service) as running:
        box = (await service.create(CreateRequest())).id
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        call = b'{"cmd": ["x"]}'
        head = f"POST /v1/sandboxes/{box}/execs HTTP/1.1\r\nHost: localhost\r\n"
        more = f"Content-Type: application/json\r\nContent-Length: {len(call)}\r\n\r\n"
        writer.write((head + more).encode() + call)
        assert b" 200 " in await reader.readline()
        connections = running.server.server_state.connections
        await eventually(lambda: not connections, what="the connection is gone")
        writer.transport.abort()
