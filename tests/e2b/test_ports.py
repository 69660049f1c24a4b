"""Servers in a sandbox, with E2B's SDK: their addresses, tokens, and the headers they see.

What passes through a port is in tests/api/test_ports.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from e2b import E2B, Sandbox

from tests.e2b.conftest import parameters
from tests.support.ports import APP
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


def listening(sandbox: Sandbox, port: int = 3000) -> None:
    """Start tests/support/port_app.py and wait until it says that it listens."""
    serving(sandbox, "app.py", APP, str(port))


def serving(sandbox: Sandbox, name: str, source: str, *arguments: str) -> None:
    sandbox.files.write(name, source)
    command = " ".join(("python3", name, *arguments))
    for out, _, _ in sandbox.commands.run(command, background=True, timeout=0):
        if out and "listening" in out:
            return
    pytest.fail("the server did not start")


def get(sandbox: Sandbox, place: RealServer, port: int = 3000, **more: str) -> httpx.Response:
    """What a browser gets at `get_host()`."""
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    host = sandbox.get_host(port)
    assert host == f"{port}-{sandbox.sandbox_id}.localhost:{place.port}"
    return httpx.get(f"{place.url}/path?q=1", headers={"host": host, **headers}, timeout=15)


def headers_seen(answer: httpx.Response) -> dict[str, Any]:
    """What the program in the sandbox was sent."""
    assert answer.status_code == 200, answer.text
    return {name.lower(): value for name, value in answer.json()["headers"]}


def test_a_server_in_a_sandbox_has_an_address(e2b: E2B, place: RealServer) -> None:
    with e2b.Sandbox.create(timeout=120) as sandbox:
        closed = get(sandbox, place)
        assert closed.status_code == 502
        assert closed.json()["message"] == "The sandbox is running but port is not open"
        listening(sandbox)
        assert get(sandbox, place).json()["target"] == "/path?q=1"
        assert headers_seen(get(sandbox, place))["host"] == sandbox.get_host(3000)
    gone = get(sandbox, place)
    assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")


def test_a_private_port_asks_for_its_token(place: RealServer) -> None:
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
        seen = headers_seen(get(sandbox, place, e2b_traffic_access_token=token))
        assert seen["host"] == "app.internal:3000"
        assert seen["x-forwarded-host"] == sandbox.get_host(3000)
        assert token not in str(seen)


SECURE = """
import http.server, ssl
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("0.0.0.0", 8443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tmp/made.pem", "/tmp/key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print("listening", flush=True)
server.serve_forever()
"""

# It answers at once with something that is no TLS.
PLAIN = """
import socket
listener = socket.create_server(("0.0.0.0", 3000))
print("listening", flush=True)
while True:
    peer, _ = listener.accept()
    peer.recv(65536)
    peer.sendall(b"220 this is no TLS\\r\\n")
    peer.close()
"""


def test_a_server_that_speaks_tls(e2b: E2B, place: RealServer, tmp_path: Path) -> None:
    made, key = tmp_path / "made.pem", tmp_path / "key.pem"
    subject = ["-days", "2", "-subj", "/CN=localhost", "-out", str(made), "-keyout", str(key)]
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", *subject]
    subprocess.run(command, check=True, capture_output=True)
    network = {"https_ports": [8443, 3000]}
    with e2b.Sandbox.create(timeout=120, network=cast(Any, network)) as sandbox:
        assert sandbox.get_info().network == network
        for file in (made, key):
            sandbox.files.write(f"/tmp/{file.name}", file.read_text())
        serving(sandbox, "secure.py", SECURE)
        named = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8443"}
        large = bytes(3_000_000)
        answer = httpx.post(place.url, content=large, headers=named, timeout=30)
        assert (answer.status_code, answer.content) == (200, large)
        serving(sandbox, "plain.py", PLAIN)
        plain = get(sandbox, place)
        assert plain.status_code >= 500 and "does not speak TLS" in plain.text
