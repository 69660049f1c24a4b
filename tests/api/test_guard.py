"""Host, Origin and keys, on HTTP and on WebSockets, through a listening server."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin, Subprotocol

from tests.api.double import Running, borrowed

KEY = "correct-horse-battery-staple"
OTHER_KEY = "another-key-of-sixteen"


async def ask(
    server: Running, method: str = "GET", path: str = "/v1/templates", **more: Any
) -> Any:
    async with httpx.AsyncClient(verify=False, base_url=server.url) as client:
        return await client.request(method, path, **more)


async def status_of_socket(server: Running, **options: Any) -> int:
    """With which a WebSocket is refused. The sandbox does not exist, so 404 means: let in."""
    uri = f"ws://127.0.0.1:{server.port}/terminal/nosuchbox"
    with pytest.raises(InvalidStatus) as refused:
        async with connect(uri, proxy=None, **options):
            pass
    return refused.value.response.status_code


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8080", "127.0.0.1", "127.8.9.1:80", "[::1]:8080", "a.localhost"],
)
async def test_names_of_loopback_are_accepted(host: str) -> None:
    async with borrowed() as server:
        assert (await ask(server, headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:8080", "localhost.evil.example", "10.0.0.1", "0x7f.1", "", "x" * 9999],
)
async def test_other_names_are_refused(host: str) -> None:
    async with borrowed() as server:
        answer = await ask(server, headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"
    assert "CAPSULE_ALLOWED_HOSTS" in answer.json()["error"]["hint"]
    async with borrowed(allowed_hosts=("capsule.example",)) as server:
        assert (await ask(server, headers={"Host": "capsule.example:8080"})).status_code == 200
        assert (await ask(server, headers={"Host": host})).status_code == 403


async def test_a_page_on_another_site_cannot_drive_the_server() -> None:
    async with borrowed() as server:
        for origin in ("http://evil.example", "null", "http://localhost:3000", "file://"):
            answer = await ask(server, "POST", "/v1/sandboxes", headers={"Origin": origin})
            assert answer.status_code == 403, origin
        assert server.service.sandboxes == {}
        answer = await ask(server, "POST", "/v1/sandboxes", headers={"Origin": server.url})
        assert answer.status_code == 201
        assert await status_of_socket(server, origin=Origin("http://evil.example")) == 403
        image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await ask(server, headers=image)).status_code == 403
        assert (await ask(server, path="/docs", headers=link)).status_code == 200
        assert await status_of_socket(server, origin=Origin(server.url)) == 404
        assert await status_of_socket(server) == 404


async def test_an_allowed_origin_gets_cors_headers() -> None:
    origin = "https://play.example"
    async with borrowed(allowed_origins=(origin,)) as server:
        asked = {"Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "content-type"
        preflight = await ask(server, "OPTIONS", "/rpc", headers={"Origin": origin, **asked})
        answer = await ask(server, headers={"Origin": origin})
        refused = await ask(server, headers={"Origin": "https://evil.example"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-origin"] == origin
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_rpc_takes_json_only(kind: str) -> None:
    async with borrowed() as server:
        call = b'{"jsonrpc":"2.0","id":1,"method":"sandbox.v1.create"}'
        answer = await ask(server, "POST", "/rpc", content=call, headers={"Content-Type": kind})
        assert answer.status_code == 415
        assert server.service.sandboxes == {}


async def test_a_known_key_opens() -> None:
    async with borrowed(api_keys=(KEY, OTHER_KEY)) as server:
        bearers = [{"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {OTHER_KEY}"}]
        for headers in (*bearers, {"X-API-Key": KEY}):
            assert (await ask(server, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": "Bearer"},
        {"X-API-Key": "\xff\xfe"},
    ],
)
async def test_without_a_known_key_nothing_opens(headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with borrowed(api_keys=(KEY, OTHER_KEY)) as server:
        for path in ("/v1/templates", "/rpc", "/nosuchpath"):
            answer = await ask(server, path=path, headers=raw)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/docs", "/openapi.json"):
            assert (await ask(server, path=path, headers=raw)).status_code == 200
        assert (await ask(server, path=f"/v1/templates?api_key={KEY}")).status_code == 401


async def test_a_socket_takes_its_key_as_a_header_or_a_subprotocol() -> None:
    def offered(key: str) -> list[Subprotocol]:
        token = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
        return [Subprotocol("capsule.terminal.raw"), Subprotocol(f"capsule.key.{token}")]

    async with borrowed(api_keys=(KEY,)) as server:
        header = {"Authorization": f"Bearer {KEY}"}
        assert await status_of_socket(server) == 401
        assert await status_of_socket(server, additional_headers=header) == 404
        assert await status_of_socket(server, subprotocols=offered(KEY)) == 404
        assert await status_of_socket(server, subprotocols=offered("wrong")) == 401


async def answered(server: Running, request: bytes) -> bytes:
    """All that comes, until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_what_follows_a_body_is_no_header() -> None:
    head = b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    key = f"X-API-Key: {KEY}\r\n".encode()
    body = b"\r\n2\r\n{}\r\n0\r\n"
    async with borrowed(api_keys=(KEY,)) as server:
        assert b" 401 " in (await answered(server, head + body + key + b"\r\n"))[:20]
        assert server.service.sandboxes == {}
        trailer = b"Host: evil.example\r\n\r\n"
        assert b" 201 " in (await answered(server, head + key + body + trailer))[:20]


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 5\r\n\r\nhello",
        b"Content-Length: 5\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_a_socket_that_cannot_begin_is_refused_at_once(rest: bytes) -> None:
    head = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    )
    head += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    async with borrowed(api_keys=(KEY,)) as server:
        assert (await answered(server, head + rest)).startswith(b"HTTP/1.1 400 ")


async def test_two_host_headers_are_refused() -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"
    request += b"Connection: close\r\n\r\n"
    async with borrowed() as server:
        assert b" 400 " in (await answered(server, request))[:20]
