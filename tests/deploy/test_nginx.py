"""deploy/nginx/*.conf in front of a real server, with other names, ports and certificate."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.support import ROOT, free_port, wait_for
from tests.support.ports import APP
from tests.support.servers import real_server

pytestmark = [pytest.mark.real, pytest.mark.needs("nginx")]
SHIPPED = ROOT / "deploy" / "nginx" / "capsule.conf"
KEY = "correct-horse-battery-staple"
KEYS = {"Authorization": f"Bearer {KEY}"}
PORTS = SHIPPED.with_name("ports.conf")
BOXES = "boxes.localhost"
NAME = "sandbox.localhost"  # the server takes names below localhost for its own

MAIN = """\
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/capsule.conf;
    include {folder}/ports.conf;
}}
"""


@dataclass(frozen=True, slots=True)
class Front:
    plain: int  # ports
    tls: int
    trust: ssl.SSLContext
    folder: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.tls}"

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, verify=self.trust, headers=KEYS, timeout=60)


def shipped_with(replaced: dict[str, str]) -> str:
    text = SHIPPED.read_text()
    for old, new in replaced.items():
        assert old in text, f"{SHIPPED.name} has no longer: {old}"
        text = text.replace(old, new)
    return text


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
    command += ["-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@contextmanager
def nginx(upstream: int, folder: Path, **also: str) -> Iterator[Front]:
    cert, key = certificate(folder)
    plain, tls = free_port(), free_port()
    replaced = {
        "127.0.0.1:8080": f"127.0.0.1:{upstream}",
        "    listen [::]:80;\n": "",
        "    listen [::]:443 ssl http2;\n": "",
        "listen 80;": f"listen 127.0.0.1:{plain};",
        "listen 443 ssl http2;": f"listen 127.0.0.1:{tls} ssl http2;",
        "/etc/letsencrypt/live/sandbox.example.org/fullchain.pem": str(cert),
        "/etc/letsencrypt/live/sandbox.example.org/privkey.pem": str(key),
        "sandbox.example.org": NAME,
        **also,
    }
    (folder / "capsule.conf").write_text(shipped_with(replaced))
    (folder / "ports.conf").write_text(
        PORTS.read_text()
        .replace("    listen [::]:443 ssl http2;\n", "")
        .replace("listen 443 ssl http2;", f"listen 127.0.0.1:{tls} ssl http2;")
        .replace("/etc/letsencrypt/live/boxes.example.org/fullchain.pem", str(cert))
        .replace("/etc/letsencrypt/live/boxes.example.org/privkey.pem", str(key))
        .replace("boxes.example.org", BOXES)
    )
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    env = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin"}
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        wait_for(lambda: _listens(process, plain, folder), what="nginx listens")
        yield Front(plain, tls, ssl.create_default_context(cafile=str(cert)), folder)
    finally:
        process.send_signal(signal.SIGQUIT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(process: subprocess.Popen[bytes], port: int, folder: Path) -> bool:
    said = (folder / "log").read_text() + "".join(
        path.read_text() for path in folder.glob("error.log")
    )
    assert process.poll() is None, said
    try:
        httpx.get(f"http://127.0.0.1:{port}/", timeout=2)
    except httpx.TransportError:
        return False
    return True


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    settings = {"API_KEYS": KEY, "METRICS": "anyone", "SANDBOX_DOMAIN": BOXES}
    settings["TRUSTED_PROXIES"] = "127.0.0.1"
    folder = tmp_path_factory.mktemp("nginx")
    with real_server(**settings) as server, nginx(server.port, folder) as made:
        yield made


async def create(http: httpx.AsyncClient, template: str = "bash") -> str:
    answer = await http.post("/v1/sandboxes", json={"template": template})
    assert answer.status_code == 201, answer.text
    id: str = answer.json()["id"]
    return id


async def test_plain_http_is_sent_to_https(front: Front) -> None:
    async with httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{front.plain}/v1/sandboxes?x=1"
        answer = await http.post(url, headers={"Host": NAME})
    assert answer.status_code == 308  # a POST stays a POST
    assert answer.headers["location"] == f"https://{NAME}/v1/sandboxes?x=1"


async def test_a_sandbox_from_create_to_delete_over_tls(front: Front) -> None:
    async with front.http() as http:
        id = await create(http)
        done = await http.post(f"/v1/sandboxes/{id}/execs", json={"cmd": ["echo", "hello"]})
        assert done.json()["stdout"] == "hello\n"
        assert "max-age" in done.headers["strict-transport-security"]
        session = (await http.post("/api/sessions", json={"environment": "bash"})).json()
        assert session["url"] == f"{front.url}/v1/sandboxes/{session['sandbox_id']}"
        await http.delete(f"/api/sessions/{session['session_id']}")
        assert (await http.delete(f"/v1/sandboxes/{id}")).status_code == 200
        assert (await http.get("/v1/sandboxes/none")).json()["error"]["code"] == "not_found"
    async with httpx.AsyncClient(base_url=front.url, verify=front.trust) as http:
        assert (await http.get("/v1/sandboxes")).status_code == 401


async def test_output_comes_while_the_program_runs(front: Front) -> None:
    async with front.http() as http:
        id = await create(http)
        script = "echo first; read -t 20 < /tmp/go; echo second"
        await http.post(f"/v1/sandboxes/{id}/execs", json={"cmd": ["mkfifo", "/tmp/go"]})
        body = {"cmd": ["bash", "-c", script]}
        accept = {"Accept": "text/event-stream"}
        seen = ""
        async with http.stream("POST", f"/v1/sandboxes/{id}/execs", json=body, headers=accept) as s:
            async for piece in s.aiter_text():
                seen += piece
                if "first" in seen and "second" not in seen and "going" not in seen:
                    seen += "going"
                    go = {"cmd": ["bash", "-c", "echo > /tmp/go"]}
                    assert (await http.post(f"/v1/sandboxes/{id}/execs", json=go)).is_success
        assert seen.index("first") < seen.index("going") < seen.index("second")
        await http.delete(f"/v1/sandboxes/{id}")


async def test_a_terminal_over_tls(front: Front) -> None:
    async with front.http() as http:
        id = await create(http)
        address = f"wss://127.0.0.1:{front.tls}/terminal/{id}"
        origin = {"Origin": front.url}  # as a browser on our own page has it
        async with connect(address, ssl=front.trust, additional_headers=KEYS | origin) as socket:
            await socket.send("echo $((40 + 2))\n")
            seen = ""
            async with asyncio.timeout(10):
                while "42" not in seen:
                    piece = await socket.recv()
                    seen += piece if isinstance(piece, str) else piece.decode()
        await http.delete(f"/v1/sandboxes/{id}")


async def test_a_large_file_is_not_stored_by_nginx(front: Front) -> None:
    content = os.urandom(1 << 20) * 24
    async with front.http() as http:
        id = await create(http)
        path = f"/v1/sandboxes/{id}/files/workspace/big"
        sent = await http.put(path, content=pieces(content))
        assert sent.is_success, sent.text
        back = await http.get(path)
        assert hashlib.sha256(back.content).digest() == hashlib.sha256(content).digest()
        spooled = sum(1 for at in ("body", "proxy") for _ in (front.folder / at).rglob("*/*/*"))
        assert spooled == 0
        await http.delete(f"/v1/sandboxes/{id}")


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 1 << 20):
        yield content[at : at + (1 << 20)]


@pytest.mark.timeout(60)
async def test_a_port_of_a_sandbox_has_its_own_name(front: Front) -> None:
    async with front.http() as http:
        made = await http.post("/v1/sandboxes", json={"ports": "public"})
        id = made.json()["id"]
        params = {"id": id, "cmd": ["python3", "-c", APP, "3000"], "timeout_ms": 600_000}
        call = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.start", "params": params}
        assert "result" in (await http.post("/rpc", json=call)).json()
        name = {"host": f"3000-{id}.{BOXES}", "authorization": "Bearer the-apps"}
        closed = "The sandbox is running but port is not open"
        answer = await http.get("/left", headers=name)
        while answer.status_code == 502:
            assert answer.json()["message"] == closed
            answer = await http.get("/left", headers=name)
        seen = (await http.post("/path?q=1", headers=name, content=bytes(3_000_000))).json()
        assert (seen["target"], seen["size"]) == ("/path?q=1", 3_000_000)
        told = {key.lower(): value for key, value in seen["headers"]}
        assert (told["host"], told["x-forwarded-proto"]) == (name["host"], "https")
        assert (told["x-forwarded-for"], told["authorization"]) == ("127.0.0.1", "Bearer the-apps")
        async with connect(
            f"wss://{name['host']}:{front.tls}/socket",
            host="127.0.0.1",
            ssl=front.trust,
            server_hostname=NAME,
            proxy=None,
        ) as ws:
            await ws.recv()
            await ws.send("through")
            assert await ws.recv() == "through"
        await http.delete(f"/v1/sandboxes/{id}")


async def test_what_is_refused(front: Front) -> None:
    async with front.http() as http:
        assert (await http.get("/metrics")).status_code == 404
        large = await http.post("/v1/sandboxes", json={"template": "x" * (20 << 20)})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
        other = await http.post("/v1/sandboxes", headers={"Origin": "https://evil.example"})
        assert other.status_code == 403
        assert "origin not allowed" in other.json()["error"]["message"]


async def test_too_many_requests_of_one_address_are_refused(tmp_path: Path) -> None:
    slow = {"rate=100r/s": "rate=1r/s", "burst=200 nodelay": "burst=1 nodelay"}
    with real_server() as server, nginx(server.port, tmp_path, **slow) as front:
        async with front.http() as http:
            answers = [await http.get("/health") for _ in range(6)]
    assert [answer.status_code for answer in answers][:2] == [200, 200]
    refused = answers[-1]
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "capacity"
    assert refused.json()["code"] == 429  # E2B's SDKs read this
    assert refused.headers["retry-after"] == "1"


async def test_rate_limits_count_the_clients_real_address(tmp_path: Path) -> None:
    settings = {"TRUSTED_PROXIES": "127.0.0.1", "RATE_LIMIT_ADDRESS": "3/minute"}
    with real_server(**settings) as server, nginx(server.port, tmp_path) as front:

        async def ask(address: str, **headers: str) -> int:
            way = httpx.AsyncHTTPTransport(verify=front.trust, local_address=address)
            async with httpx.AsyncClient(transport=way, base_url=front.url) as http:
                return (await http.get("/v1/sandboxes", headers=headers)).status_code

        assert [await ask("127.0.0.2") for _ in range(4)] == [200, 200, 200, 429]
        claimed = {"X-Forwarded-For": "203.0.113.9"}
        assert await ask("127.0.0.2", **claimed) == 429
        assert await ask("127.0.0.3") == 200


async def test_a_server_that_is_down_is_unavailable_at_once(tmp_path: Path) -> None:
    with nginx(free_port(), tmp_path) as front:
        async with front.http() as http:
            began = time.monotonic()
            answer = await http.get("/v1/sandboxes")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unavailable"
    assert time.monotonic() - began < 15
