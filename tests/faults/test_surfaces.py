"""A server that is killed while a playground is used, and the one that comes after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.folders import server_folder
from tests.support.servers import RealServer, real_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
def home() -> Iterator[dict[str, str]]:
    with server_folder("ck-", mode=0o755) as path:
        yield {"DATA_DIR": str(path / "d"), "RUN_DIR": str(path / "r")}


def kill(server: RealServer) -> None:
    server.process.kill()
    server.process.wait()


def ask(server: RealServer, path: str, **body: Any) -> Any:
    url = f"{server.url}/api/playground/{path}"
    answer = httpx.post(url, json={"sessionId": "mine", **body}, timeout=20)
    assert answer.status_code == 200, answer.text
    return answer.json()


def node(name: str, content: str) -> dict[str, str]:
    return {"name": name, "type": "file", "content": content}


def test_a_playgrounds_container_goes_on_after_a_kill(home: dict[str, str]) -> None:
    """Its session finds it again, and a sync still knows what earlier ones wrote."""
    with real_server(**home, DRAIN="keep") as server:
        container = ask(server, "container", template="bash")["containerId"]
        ask(server, "sync", files=[node("kept", "1"), node("old", "2")])
        kill(server)
    with real_server(**home) as server:
        found = ask(server, "container")
        assert (found["containerId"], found["existing"]) == (container, True)
        done = ask(server, "sync", files=[node("kept", "1"), node("new.sh", "ls")])
        assert (done["written"], done["deleted"], done["unchanged"]) == (["new.sh"], ["old"], 1)
        assert (
            ask(server, "execute", code="ls", filename="x.sh")["output"] == "kept\nnew.sh\nx.sh\n"
        )
