"""`SandboxClient`, for agents that run commands in one session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capsule_sdk import (
    CapsuleClient,
    GoneError,
    InvalidError,
    NotFoundError,
    SandboxClient,
    WrongStateError,
)
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


@pytest.fixture
def agent(server: RealServer) -> Iterator[SandboxClient]:
    with SandboxClient(server.url) as made:
        yield made


def test_a_session_runs_a_command_and_ends(server: RealServer) -> None:
    client = SandboxClient(server.url)
    session = client.create_session()
    result = client.execute("echo 'bash command'")
    assert result == {"exit_code": 0, "output": "bash command\n"}
    assert client.execute("exit 3")["exit_code"] == 3
    client.cleanup()
    client.cleanup()
    assert client.session_id is None
    client.close()
    with CapsuleClient(server.url) as capsule, pytest.raises(GoneError):
        capsule.get(session)


def test_a_new_session_ends_the_one_before(agent: SandboxClient, server: RealServer) -> None:
    first = str(agent.session_id)
    second = agent.create_session()
    assert second == agent.session_id != first
    with CapsuleClient(server.url) as capsule, pytest.raises(GoneError):
        capsule.get(first)


def test_files_are_uploaded(agent: SandboxClient) -> None:
    assert agent.upload("data/x.bin", b"\r\n--\x00\xff") == "/workspace/data/x.bin"
    assert agent.upload("t.txt", "grüße") == "/workspace/t.txt"
    assert agent.execute("cat t.txt; wc -c < data/x.bin")["output"] == "grüße6\n"
    with pytest.raises(InvalidError, match=r"'\.\.' component"):
        agent.upload("../x", b"")


def test_what_is_wrong_is_named_as_it_was_given(agent: SandboxClient, server: RealServer) -> None:
    with pytest.raises(InvalidError, match=r"^timeout=0 is out of range"):
        agent.execute("true", timeout=0)
    with pytest.raises(InvalidError, match=r"^command="):
        agent.execute(3)  # type: ignore[arg-type]
    with pytest.raises(WrongStateError, match="create_session"):
        SandboxClient(server.url).execute("true")
    with pytest.raises(NotFoundError, match="session 'abc-123' does not exist"):
        SandboxClient(server.url, session_id="abc-123").execute("true")
    with pytest.raises(NotFoundError, match="template"):
        SandboxClient(server.url, template="nope").create_session()
