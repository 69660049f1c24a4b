"""Each surface that others have drawn, on a server whose sandboxes are containers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from capsule_sdk import CapsuleClient, SandboxClient
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.support.servers import RealServer, real_server

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def containers(engine: EngineApi, images: Images) -> Iterator[RealServer]:
    prefix = images.python.removesuffix("python")
    assert images.node == f"{prefix}node"
    settings = {
        "PROVIDER": "docker",
        "DOCKER_HOST": engine.url,
        "DOCKER_PULL": "never",
        "DOCKER_IMAGE": f"{prefix}{{template}}",
    }
    with real_server(**settings) as server:
        yield server


@pytest.fixture
def http(containers: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=containers.url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def provider_of(http: httpx.Client, sandbox: str) -> str:
    return str(http.get(f"/v1/sandboxes/{sandbox}").json()["provider"])


def test_sandboxes_for_agents(http: httpx.Client, containers: RealServer) -> None:
    session = ask(http, "/create_session")["session_id"]
    assert provider_of(http, session) == "docker"
    form = {"session_id": session}
    files = {"file": ("in/data.bin", bytes(range(256)))}
    assert http.post("/upload", data=form, files=files).json() == {
        "files": [{"path": "/workspace/in/data.bin", "size": 256}]
    }
    ran = ask(http, "/execute", session_id=session, command="wc -c < in/data.bin; exit 3")
    assert ran == {"exit_code": 3, "output": "256\n"}
    limits = http.get(f"/v1/sandboxes/{session}").json()["limits"]
    assert (limits["memory"], limits["cpus"]) == (512 << 20, 0.5)
    assert ask(http, "/cleanup", session_id=session) == {"status": "removed"}
    with SandboxClient(containers.url) as client:
        assert client.execute("echo hi") == {"exit_code": 0, "output": "hi\n"}


def test_the_playground(http: httpx.Client) -> None:
    made = ask(http, "/api/playground/container", sessionId="p")
    assert made["success"] and not made["existing"]
    assert provider_of(http, made["containerId"]) == "docker"
    picture = {
        "name": "a.bin",
        "type": "file",
        "content": base64.b64encode(b"\xff\x00").decode(),
        "encoding": "base64",
    }
    lib = {"name": "lib.js", "type": "file", "content": "exports.six = 6"}
    tree = [{"name": "src", "type": "folder", "children": [lib, picture]}]
    synced = ask(http, "/api/playground/sync", sessionId="p", files=tree)
    assert sorted(synced["written"]) == ["src/a.bin", "src/lib.js"]
    assert ask(http, "/api/playground/sync", sessionId="p", files=tree)["unchanged"] == 2
    code = "console.log(require('./src/lib').six * require('fs').statSync('src/a.bin').size)"
    ran = ask(http, "/api/playground/execute", sessionId="p", code=code, filename="index.js")
    assert (ran["success"], ran["output"]) == (True, "12\n"), ran
    gone = ask(http, "/api/playground/sync", sessionId="p", files=[])
    assert sorted(gone["deleted"]) == ["src", "src/a.bin", "src/lib.js"]
    wanted = {"sessionId": "p", "packages": ["left-pad"]}
    refused = http.post("/api/playground/install", json=wanted)
    assert refused.status_code == 403 and "`network` is none" in refused.json()["error"]["message"]
    assert ask(http, "/api/playground/container", sessionId="p")["existing"]
    assert http.delete("/api/playground/container?sessionId=p").json()["success"]
    assert http.get("/api/playground/container?sessionId=p").status_code == 404


def test_sessions_with_an_agents_tools(http: httpx.Client, containers: RealServer) -> None:
    with CapsuleClient(containers.url) as client:
        sessions = client.sessions
        made = sessions.create(agent="code_executor")
        assert made.provider == "docker"
        id = made.session_id
        assert sessions.execute(id, "x = 20\nx + 1").text == "21"
        assert sessions.execute(id, "x * 2 + 2").text == "42"
        sessions.write_file(id, "notes.txt", "hello")
        for tool in sessions.tools(id):
            assert tool["name"] and tool["parameters"]["type"] == "object"
        sessions.close(id)
        assert sessions.reopen(id).provider == "docker"
        assert sessions.read_file(id, "notes.txt") == b"hello"
        sessions.delete(id, purge=True)
