"""What listens in a sandbox, over HTTP: both ways as streams, and nothing of it our own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.api.client import Api
from tests.support import eventually
from tests.support.ports import by_header, by_name, sandbox, start_app
from tests.support.servers import RealServer

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


def told(answer: httpx.Response) -> dict[str, list[str]]:
    """The headers that the program was shown."""
    found: dict[str, list[str]] = {}
    for name, value in answer.json()["headers"]:
        found.setdefault(name.lower(), []).append(value)
    return found


@pytest.mark.parametrize("way", [by_name, by_header])
async def test_a_port_is_found_by_name_and_by_header(api: Api, app: str, way: Any) -> None:
    answer = await api.http.get("/some/path?q=1&q=%20", headers=way(app))
    assert answer.status_code == 200
    assert answer.json()["target"] == "/some/path?q=1&q=%20"
    assert answer.headers["x-of-app"] == "yes"
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "keep-alive" not in answer.headers
    assert len(answer.headers.get_list("date")) == 1


@pytest.mark.parametrize("path", ["/rpc", "/v1/sandboxes", "/health", "/docs", "/a%2Fb/%00/ü"])
async def test_no_path_there_is_ours(web: httpx.AsyncClient, path: str) -> None:
    answer = await web.get(path)
    assert "size" in answer.json()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"])
async def test_methods_pass(web: httpx.AsyncClient, method: str) -> None:
    answer = await web.request(method, "/", content=b"body")
    assert (answer.json()["method"], answer.json()["size"]) == (method, 4)


async def test_nobody_tunnels_through_a_program(server: RealServer, web: httpx.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    host = web.headers["host"]
    writer.write(f"CONNECT /p HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    assert (await web.get("/")).status_code == 200


async def test_head_has_no_body(web: httpx.AsyncClient) -> None:
    assert (await web.head("/")).content == b""


async def test_a_body_passes_with_a_length_and_in_chunks(web: httpx.AsyncClient) -> None:
    data = os.urandom(20_000_000)  # more than our own routes would take
    digest = hashlib.sha256(data).hexdigest()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1_000_000):
            yield data[start : start + 1_000_000]

    whole = await web.post("/", content=data)
    chunked = await web.post("/", content=pieces())
    assert (whole.json()["sha256"], chunked.json()["sha256"]) == (digest, digest)
    assert told(whole)["content-length"] == ["20000000"]
    assert told(chunked)["transfer-encoding"] == ["chunked"]


async def test_a_large_answer_passes(web: httpx.AsyncClient) -> None:
    size = 0
    async with web.stream("GET", "/big?67108864") as answer:
        async for piece in answer.aiter_raw():
            size += len(piece)
    assert size == 67108864


async def test_events_arrive_as_they_are_sent(web: httpx.AsyncClient, app: str) -> None:
    async with web.stream("GET", "/chunked") as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == 'data: {"n": 1}'
        assert (await web.get("/go")).status_code == 200
        assert [line async for line in lines if line] == ['data: {"n": 2}']


async def test_an_answer_may_end_with_its_connection(web: httpx.AsyncClient) -> None:
    assert (await web.get("/until-close")).text == "all there is"


@pytest.mark.parametrize("code", [201, 204, 301, 304, 404, 500, 503])
async def test_a_status_is_the_programs(web: httpx.AsyncClient, code: int) -> None:
    assert (await web.get(f"/status?{code}", follow_redirects=False)).status_code == code


async def test_an_answer_may_come_before_the_end_of_the_request(web: httpx.AsyncClient) -> None:
    answer = await web.post("/early", content=bytes(8_000_000))
    assert (answer.status_code, answer.json()) == (413, {"too": "large"})


async def test_what_is_told_of_the_client_is_ours_to_tell(web: httpx.AsyncClient, app: str) -> None:
    lies = {
        "x-forwarded-for": "1.2.3.4",
        "x-forwarded-host": "bank",
        "x-forwarded-proto": "https",
        "forwarded": "for=1.2.3.4",
        "x-real-ip": "1.2.3.4",
    }
    shown = told(await web.get("/", headers=lies))
    assert shown["host"] == shown["x-forwarded-host"] == [f"3000-{app}.localhost"]
    assert shown["x-forwarded-for"] == ["127.0.0.1"]
    assert shown["x-forwarded-proto"] == ["http"]
    assert not shown.keys() & {"forwarded", "x-real-ip"}


async def test_headers_of_the_connection_end_with_it(web: httpx.AsyncClient) -> None:
    headers = {
        "connection": "keep-alive, x-mine",
        "x-mine": "1",
        "te": "trailers",
        "proxy-authorization": "Basic eDp5",
        "cookie": "a=1",
        "authorization": "Bearer of-the-app",
        "x-api-key": "of-the-app",
        "e2b-anything": "1",
    }
    shown = told(await web.get("/", headers=headers))
    assert shown["connection"] == ["close"]
    gone = {"x-mine", "te", "proxy-authorization", "keep-alive", "e2b-anything"}
    assert not shown.keys() & gone
    # Nobody has a key here, so this is the program's own business.
    assert shown["authorization"] == ["Bearer of-the-app"]
    assert (shown["x-api-key"], shown["cookie"]) == (["of-the-app"], ["a=1"])


async def test_requests_of_other_origins_are_the_programs_business(
    web: httpx.AsyncClient, api: Api, app: str
) -> None:
    cross = {"origin": "https://elsewhere.example", "sec-fetch-site": "cross-site"}
    assert (await web.post("/", headers=cross)).status_code == 200
    asked = {**cross, "access-control-request-method": "PUT"}
    preflight = await web.options("/", headers=asked)
    assert preflight.json()["method"] == "OPTIONS"
    # By header it is our own origin, which other pages may not use.
    assert (await api.http.post("/", headers={**cross, **by_header(app)})).status_code == 403


async def test_a_page_from_a_sandbox_is_a_stranger_to_the_api(api: Api, app: str) -> None:
    origin = {"origin": f"http://3000-{app}.localhost:8080"}
    for headers in (origin, {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}):
        answer = await api.http.get("/v1/sandboxes", headers={"host": "localhost:8080", **headers})
        assert answer.status_code == 403, headers


async def test_a_name_wins_over_headers(web: httpx.AsyncClient, app: str) -> None:
    other = {"e2b-sandbox-id": "abcdefghijklmnop", "e2b-sandbox-port": "49983"}
    assert (await web.get("/", headers=other)).json()["target"] == "/"


async def test_the_end_of_an_answer_cannot_be_made_up(web: httpx.AsyncClient) -> None:
    short = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"
    with pytest.raises(httpx.RemoteProtocolError):
        await web.get(f"/raw?{short.hex()}")


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
        b"HTTP/1.1 999 Beyond\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_a_502(web: httpx.AsyncClient, wire: bytes) -> None:
    answer = await web.get(f"/raw?{wire.hex()}")
    assert answer.status_code == 502
    said = "gave no answer of HTTP" if wire else "closed the connection without an answer"
    assert answer.json()["message"].startswith(f"The program in the sandbox {said}")


async def test_a_length_beside_chunks_is_dropped(web: httpx.AsyncClient) -> None:
    wire = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"5\r\nhello\r\n0\r\n\r\n"
    answer = await web.get(f"/raw?{wire.hex()}")
    assert answer.text == "hello"


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
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
        peer.sendall(request.encode())
        assert peer.recv(65536).startswith(b"HTTP/1.1 400 ")


def asked(server: RealServer, request: str) -> bytes:
    """All that comes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
        peer.sendall(request.encode())
        return b"".join(iter(lambda: peer.recv(65536), b""))


def test_trailers_lead_nowhere_and_are_not_shown(server: RealServer, app: str) -> None:
    head = "POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    body = "\r\n5\r\nhello\r\n0\r\n"
    door = f"E2b-Sandbox-Id: {app}\r\nE2b-Sandbox-Port: 3000\r\n"
    there = f"{head}Host: 3000-{app}.localhost\r\n{body}"
    answer = asked(server, f"{there}X-Late: 1\r\nHost: localhost\r\n\r\n")
    assert b'"size": 5' in answer and b"late" not in answer.lower()
    assert b'"size"' not in asked(server, f"{head}Host: localhost\r\n{body}{door}\r\n")


@pytest.mark.parametrize(
    "rest", ["Content-Length: 5\r\n\r\nhello", "Content-Length: 5\r\n\r\n", "\r\n"]
)
def test_a_socket_begins_with_a_get_alone(server: RealServer, app: str, rest: str) -> None:
    head = f"POST / HTTP/1.1\r\nHost: 3000-{app}.localhost\r\nConnection: Upgrade\r\n"
    head += "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    head += "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    assert asked(server, head + rest).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 "))


def test_there_is_no_tunnel(server: RealServer, app: str) -> None:
    request = f"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 3000-{app}.localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
        peer.sendall(request.encode())
        assert peer.recv(65536).startswith(b"HTTP/1.1 400 ")


async def test_who_leaves_is_gone_inside_too(web: httpx.AsyncClient) -> None:
    before = (await web.get("/left")).json()
    with pytest.raises(httpx.ReadTimeout):
        await web.get("/hang", timeout=0.3)

    async def noticed() -> bool:
        return bool((await web.get("/left")).json() > before)

    await eventually(noticed, what="the program's connection closed")


async def test_many_at_once(web: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(web.get(f"/{n}") for n in range(40)))
    assert [a.json()["target"] for a in answers] == [f"/{n}" for n in range(40)]


async def test_a_closed_port_says_so(api: Api, app: str) -> None:
    answer = await api.http.get("/", headers=by_name(app, 3999))
    assert answer.status_code == 502
    assert answer.json() == {
        "sandboxId": app,
        "message": "The sandbox is running but port is not open",
        "port": 3999,
        "code": 502,
    }


async def test_a_browser_is_told_what_to_do(api: Api, app: str) -> None:
    page = {"accept": "text/html,*/*"}
    answer = await api.http.get("/", headers={**by_name(app, 3999), **page})
    assert answer.status_code == 502
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "0.0.0.0:3999" in answer.text
    gone = await api.http.get("/", headers={**by_name("nobody"), **page})
    assert "No such sandbox" in gone.text


@pytest.mark.parametrize("port", [0, 65536, 99999])
async def test_what_is_no_port_is_refused(api: Api, app: str, port: int) -> None:
    for way in (by_name, by_header):
        assert (await api.http.get("/", headers=way(app, port))).status_code == 400


@pytest.mark.parametrize("port", ["0003000", "049983", "-1", "3000x", "3000, 49983"])
async def test_a_port_in_a_header_is_a_number(api: Api, app: str, port: str) -> None:
    answer = await api.http.get("/", headers={**by_header(app), "e2b-sandbox-port": port})
    assert answer.status_code == 400
    assert "allowed: 1 to 65535" in answer.text


@pytest.mark.parametrize(
    "name",
    ["x.3000-{}", "3000-{}-x", "000003000-{}", "03000-{}", "049983-{}", "a3000-{}", "3000-{}.x"],
)
async def test_a_name_near_that_of_a_port_is_nobodys(api: Api, app: str, name: str) -> None:
    for path in ("/", "/health", "/v1/sandboxes"):
        answer = await api.http.get(path, headers={"host": name.format(app) + ".localhost:8080"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("id", ["abcdefghijklmnop", "x", "ABCDEFGHIJKLMNOP"])
async def test_an_unknown_sandbox_is_not_found(api: Api, id: str) -> None:
    for way in (by_name, by_header):
        answer = await api.http.get("/", headers=way(id))
        assert answer.status_code == 502
        assert answer.json()["message"] == "The sandbox was not found"


async def test_a_name_of_another_domain_is_not_ours(api: Api, app: str) -> None:
    answer = await api.http.get("/", headers=by_name(app, domain="evil.example"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


async def test_a_server_on_ipv6_is_reached(server: RealServer, api: Api, app: str) -> None:
    start_app(server.url, app, 3001, "::1")
    assert (await api.http.get("/", headers=by_name(app, 3001))).status_code == 200


async def test_traffic_wakes_a_paused_sandbox(server: RealServer, api: Api) -> None:
    with sandbox(server.url, auto_resume=True) as id:
        start_app(server.url, id)
        await api.rpc("pause", id=id)
        assert (await api.http.get("/", headers=by_name(id))).status_code == 200
        assert (await api.rpc("get", id=id))["state"] == "running"


async def test_a_paused_sandbox_is_not_found(server: RealServer, api: Api, app: str) -> None:
    await api.rpc("pause", id=app)
    try:
        answer = await api.http.get("/", headers=by_name(app))
        assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
    finally:
        await api.rpc("resume", id=app)
    assert (await api.http.get("/", headers=by_name(app))).status_code == 200


async def test_the_host_is_told_as_it_was_written(api: Api, app: str) -> None:
    answer = await api.http.get("/", headers={"host": f"3000-{app.upper()}.LOCALHOST:8080"})
    assert told(answer)["host"] == [f"3000-{app.upper()}.LOCALHOST:8080"]
