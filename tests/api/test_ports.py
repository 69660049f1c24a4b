"""What listens in a sandbox, over HTTP and WebSockets: all passes as streams, and no part of it is
the API's."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
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
    """The id of a sandbox in which the server of tests/support/port_app.py listens."""
    with sandbox(server.url) as id:
        start_app(server.url, id)
        yield id


@pytest.fixture
async def web(server: RealServer, app: str) -> AsyncIterator[httpx.AsyncClient]:
    """As a browser at http://3000-ID.localhost/."""
    async with httpx.AsyncClient(base_url=server.url, headers=by_name(app), timeout=15) as http:
        yield http


def shown(answer: httpx.Response) -> dict[str, list[str]]:
    """The headers that the program was shown."""
    found: dict[str, list[str]] = {}
    for name, value in answer.json()["headers"]:
        found.setdefault(name.lower(), []).append(value)
    return found


def asked(server: RealServer, request: str) -> bytes:
    """All that comes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
        peer.sendall(request.encode())
        return b"".join(iter(lambda: peer.recv(65536), b""))


@pytest.mark.parametrize("way", [by_name, by_header])
async def test_a_port_is_found_by_name_and_by_header(api: Api, app: str, way: Any) -> None:
    answer = await api.http.get("/some/path?q=1&q=%20", headers=way(app))
    assert answer.status_code == 200
    assert answer.json()["target"] == "/some/path?q=1&q=%20"
    assert answer.headers["x-of-app"] == "yes"
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "keep-alive" not in answer.headers
    assert len(answer.headers.get_list("date")) == 1


async def test_paths_methods_and_statuses_are_the_programs(web: httpx.AsyncClient) -> None:
    for path in ("/rpc", "/v1/sandboxes", "/health", "/docs", "/a%2Fb/%00/ü"):
        assert "size" in (await web.get(path)).json()
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"):
        answer = await web.request(method, "/", content=b"body")
        assert (answer.json()["method"], answer.json()["size"]) == (method, 4)
    assert (await web.head("/")).content == b""
    for code in (201, 204, 301, 304, 404, 500, 503):
        answer = await web.get(f"/status?{code}", follow_redirects=False)
        assert answer.status_code == code


async def test_large_bodies_pass_both_ways(web: httpx.AsyncClient) -> None:
    data = os.urandom(20_000_000)  # more than the API's own routes would take
    digest = hashlib.sha256(data).hexdigest()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1_000_000):
            yield data[start : start + 1_000_000]

    whole = await web.post("/", content=data)
    chunked = await web.post("/", content=pieces())
    assert (whole.json()["sha256"], chunked.json()["sha256"]) == (digest, digest)
    assert shown(whole)["content-length"] == ["20000000"]
    assert shown(chunked)["transfer-encoding"] == ["chunked"]
    size = 0
    async with web.stream("GET", "/big?67108864") as answer:
        async for piece in answer.aiter_raw():
            size += len(piece)
    assert size == 67108864


async def test_events_arrive_as_they_are_sent(web: httpx.AsyncClient) -> None:
    async with web.stream("GET", "/chunked") as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == 'data: {"n": 1}'
        assert (await web.get("/go")).status_code == 200
        assert [line async for line in lines if line] == ['data: {"n": 2}']


async def test_forwarding_headers_come_from_the_server_alone(
    web: httpx.AsyncClient, app: str
) -> None:
    lies = {
        "x-forwarded-for": "1.2.3.4",
        "x-forwarded-host": "bank",
        "x-forwarded-proto": "https",
        "forwarded": "for=1.2.3.4",
        "x-real-ip": "1.2.3.4",
    }
    seen = shown(await web.get("/", headers=lies))
    assert seen["host"] == seen["x-forwarded-host"] == [f"3000-{app}.localhost"]
    assert (seen["x-forwarded-for"], seen["x-forwarded-proto"]) == (["127.0.0.1"], ["http"])
    assert not seen.keys() & {"forwarded", "x-real-ip"}


async def test_headers_of_the_connection_end_with_it(web: httpx.AsyncClient) -> None:
    ended = {
        "x-mine": "1",
        "te": "trailers",
        "proxy-authorization": "Basic eDp5",
        "keep-alive": "1",
        "e2b-anything": "1",
    }
    # Without keys on the server these are the program's own.
    passed = {"cookie": "a=1", "authorization": "Bearer of-the-app", "x-api-key": "of-the-app"}
    headers = {"connection": "keep-alive, x-mine", **ended, **passed}
    seen = shown(await web.get("/", headers=headers))
    assert seen["connection"] == ["close"]
    assert not seen.keys() & ended.keys()
    assert {name: seen[name][0] for name in passed} == passed


async def test_requests_of_other_origins_pass_to_a_program_and_not_to_the_api(
    web: httpx.AsyncClient, api: Api, app: str
) -> None:
    cross = {"origin": "https://elsewhere.example", "sec-fetch-site": "cross-site"}
    assert (await web.post("/", headers=cross)).status_code == 200
    preflight = await web.options("/", headers={**cross, "access-control-request-method": "PUT"})
    assert preflight.json()["method"] == "OPTIONS"
    # By header it is the server's own origin, which other pages may not use.
    assert (await api.http.post("/", headers={**cross, **by_header(app)})).status_code == 403
    origin = {"origin": f"http://3000-{app}.localhost:8080"}
    for headers in (origin, {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}):
        answer = await api.http.get("/v1/sandboxes", headers={"host": "localhost:8080", **headers})
        assert answer.status_code == 403, headers


async def test_a_cut_answer_is_visibly_cut(web: httpx.AsyncClient) -> None:
    short = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"
    with pytest.raises(httpx.RemoteProtocolError):
        await web.get(f"/raw?{short.hex()}")
    assert (await web.get("/until-close")).text == "all there is"


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
        b"HTTP/1.1 000 None\r\n\r\n",
        b"HTTP/1.1 600 Beyond\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_a_broken_answer_is_a_502(web: httpx.AsyncClient, wire: bytes) -> None:
    answer = await web.get(f"/raw?{wire.hex()}")
    assert answer.status_code == 502
    said = "gave no answer of HTTP" if wire else "closed the connection without an answer"
    assert answer.json()["message"].startswith(f"The program in the sandbox {said}")


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    ],
)
async def test_a_request_of_two_lengths_is_refused(server: RealServer, app: str, head: str) -> None:
    request = f"POST / HTTP/1.1\r\nHost: 3000-{app}.localhost\r\n{head}\r\n0\r\n\r\n"
    assert asked(server, request).startswith(b"HTTP/1.1 400 ")


def test_trailers_have_no_effect_and_are_not_shown(server: RealServer, app: str) -> None:
    head = "POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    body = "\r\n5\r\nhello\r\n0\r\n"
    port = f"E2b-Sandbox-Id: {app}\r\nE2b-Sandbox-Port: 3000\r\n"
    there = f"{head}Host: 3000-{app}.localhost\r\n{body}"
    answer = asked(server, f"{there}X-Late: 1\r\nHost: localhost\r\n\r\n")
    assert b'"size": 5' in answer and b"late" not in answer.lower()
    assert b'"size"' not in asked(server, f"{head}Host: localhost\r\n{body}{port}\r\n")


def test_there_is_no_tunnel_and_a_websocket_begins_with_get(server: RealServer, app: str) -> None:
    host = f"Host: 3000-{app}.localhost\r\n"
    for target in ("127.0.0.1:22", "/p"):
        tunnel = f"CONNECT {target} HTTP/1.1\r\n{host}Connection: close\r\n\r\n"
        assert asked(server, tunnel).startswith(b"HTTP/1.1 400 ")
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    for rest in ("Content-Length: 5\r\n\r\nhello", "\r\n"):
        answer = asked(server, f"POST / HTTP/1.1\r\n{host}{upgrade}{rest}")
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 "))


async def test_a_client_that_leaves_is_gone_inside_too(web: httpx.AsyncClient) -> None:
    before = (await web.get("/left")).json()
    with pytest.raises(httpx.ReadTimeout):
        await web.get("/hang", timeout=0.3)

    async def noticed() -> bool:
        return bool((await web.get("/left")).json() > before)

    await eventually(noticed, what="the program's connection closed")


async def test_a_closed_port_and_an_unknown_sandbox_are_a_502(api: Api, app: str) -> None:
    closed = await api.http.get("/", headers=by_name(app, 3999))
    assert closed.status_code == 502
    assert closed.json() == {
        "sandboxId": app,
        "message": "The sandbox is running but port is not open",
        "port": 3999,
        "code": 502,
    }
    for way in (by_name, by_header):
        unknown = await api.http.get("/", headers=way("ABCDEFGHIJKLMNOP"))
        assert unknown.status_code == 502
        assert unknown.json()["message"] == "The sandbox was not found"
    page = {"accept": "text/html,*/*"}
    answer = await api.http.get("/", headers={**by_name(app, 3999), **page})
    assert (answer.status_code, "0.0.0.0:3999" in answer.text) == (502, True)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert (
        "No such sandbox" in (await api.http.get("/", headers={**by_name("nobody"), **page})).text
    )


async def test_a_wrong_port_is_refused(api: Api, app: str) -> None:
    for port in (0, 65536):
        for way in (by_name, by_header):
            assert (await api.http.get("/", headers=way(app, port))).status_code == 400
    for wrong in ("0003000", "-1", "3000x", "3000, 49983"):
        answer = await api.http.get("/", headers={**by_header(app), "e2b-sandbox-port": wrong})
        assert answer.status_code == 400
        assert "allowed: 1 to 65535" in answer.text


@pytest.mark.parametrize(
    "name",
    ["x.3000-{}", "3000-{}-x", "03000-{}", "049983-{}", "a3000-{}", "3000-{}.x"],
)
async def test_a_name_near_that_of_a_port_is_forbidden(api: Api, app: str, name: str) -> None:
    for host in (f"{name.format(app)}.localhost:8080", f"3000-{app}.evil.example"):
        answer = await api.http.get("/health", headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


async def test_a_server_on_ipv6_is_reached(server: RealServer, api: Api, app: str) -> None:
    start_app(server.url, app, 3001, "::1")
    assert (await api.http.get("/", headers=by_name(app, 3001))).status_code == 200


async def test_traffic_wakes_a_paused_sandbox_where_asked_for(
    server: RealServer, api: Api, app: str
) -> None:
    await api.rpc("pause", id=app)
    answer = await api.http.get("/", headers=by_name(app))
    await api.rpc("resume", id=app)
    assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
    with sandbox(server.url, auto_resume=True) as id:
        start_app(server.url, id)
        await api.rpc("pause", id=id)
        assert (await api.http.get("/", headers=by_name(id))).status_code == 200
        assert (await api.rpc("get", id=id))["state"] == "running"


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
    sent = {"Origin": "https://elsewhere.example", "Cookie": "a=1", "E2b-Secret": "1"}
    offered = ("chat", "superchat", "capsule.key.c2VjcmV0")
    async with joined(server, app, *offered, path="/socket?q=%20", **sent) as (ws, seen):
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
async def test_a_websocket_whose_client_leaves_is_gone_inside_too(
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
