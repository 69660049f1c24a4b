"""A server that is killed in the middle of a session, and the one that comes after it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule_sdk import CapsuleClient, GoneError, SandboxClient
from tests.support.servers import RealServer, real_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
def home() -> Iterator[dict[str, str]]:
    path = Path(tempfile.mkdtemp(prefix="ck-", dir="/tmp"))
    path.chmod(0o755)
    yield {"DATA_DIR": str(path / "d"), "RUN_DIR": str(path / "r")}
    shutil.rmtree(path, ignore_errors=True)


def kill(server: RealServer) -> None:
    server.process.kill()
    server.process.wait()


def test_an_agents_session_goes_on_after_a_kill(home: dict[str, str]) -> None:
    with real_server(**home, DRAIN="keep") as server:
        client = SandboxClient(server.url)
        session = client.create_session()
        client.upload("notes.txt", "remember")
        client.execute("nohup sleep 300 >/dev/null 2>&1 &")
        client.close()
        kill(server)
    with real_server(**home) as server, SandboxClient(server.url, session_id=session) as client:
        assert client.execute("cat notes.txt; pgrep -c sleep")["output"] == "remember1\n"
        client.cleanup()
        with CapsuleClient(server.url) as all, pytest.raises(GoneError):
            all.get(session)
