"""Sessions for agents, the playground and stateful sessions, with containers as sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from capsule_sdk import CapsuleClient
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


def test_sessions_for_agents(http: httpx.Client) -> None:
    session = ask(http, "/create_session")["session_id"]
    assert provider_of(http, session) == "docker"
    form = {"session_id": session}
    files = {"file": ("in/data.bin", bytes(range(256)))}
    assert http.post("/upload", data=form, files=files).json() == {
        "files": [{"path": "/workspace/in/data.bin", "size": 256}]
    }
    ran = ask(http, "/execute", session_id=session, command="wc -c < in/data.bin; exit 3")
    assert ran == {"exit_code": 3, "output": "256\n"}
    assert ask(http, "/cleanup", session_id=session) == {"status": "removed"}


def test_the_playground(http: httpx.Client) -> None:
    made = ask(http, "/api/playground/container", sessionId="p")
    assert made["success"] and not made["existing"]
    assert provider_of(http, made["containerId"]) == "docker"
    lib = {"name": "lib.js", "type": "file", "content": "exports.six = 6"}
    tree = [{"name": "src", "type": "folder", "children": [lib]}]
    synced = ask(http, "/api/playground/sync", sessionId="p", files=tree)
    assert synced["written"] == ["src/lib.js"]
    assert ask(http, "/api/playground/sync", sessionId="p", files=tree)["unchanged"] == 1
    code = "console.log(require('./src/lib').six * 7)"
    ran = ask(http, "/api/playground/execute", sessionId="p", code=code, filename="index.js")
    assert (ran["success"], ran["output"]) == (True, "42\n"), ran
    gone = ask(http, "/api/playground/sync", sessionId="p", files=[])
    assert sorted(gone["deleted"]) == ["src", "src/lib.js"]
    assert http.delete("/api/playground/container?sessionId=p").json()["success"]


def test_sessions_with_an_agents_tools(http: httpx.Client, containers: RealServer) -> None:
    with CapsuleClient(containers.url) as client:
        sessions = client.sessions
        made = sessions.create(agent="code_executor")
        assert made.provider == "docker"
        id = made.session_id
        did = sessions.execute(id, "open('artifacts/a.txt', 'w').write('left')\n6 * 7")
        assert did.text == "42"
        assert http.get(did.artifacts[0].url).text == "left"
        sessions.write_file(id, "notes.txt", "hello")
        sessions.close(id)
        assert sessions.reopen(id).provider == "docker"
        assert sessions.read_file(id, "notes.txt") == b"hello"
        sessions.delete(id, purge=True)
