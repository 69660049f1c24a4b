"""`SandboxClient`, as the seed's agent uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capsule_sdk import (
    CapsuleClient,
    GoneError,
    InvalidError,
    NotFoundError,
    SandboxClient,
    UnavailableError,
    WrongStateError,
)
from tests.support import free_port
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


@pytest.fixture
def agent(server: RealServer) -> Iterator[SandboxClient]:
    with SandboxClient(server.url) as made:
        yield made


def test_the_seeds_four_lines(server: RealServer) -> None:
    client = SandboxClient(server.url)
    session = client.create_session()
    result = client.execute("echo 'bash command'")
    assert result == {"exit_code": 0, "output": "bash command\n"}
    client.cleanup()
    client.close()
    with CapsuleClient(server.url) as capsule, pytest.raises(GoneError):
        capsule.get(session)


def test_a_context_manager_makes_and_ends_it(server: RealServer) -> None:
    with SandboxClient(server.url) as client:
        session = client.session_id
        assert client.execute("exit 3")["exit_code"] == 3
    assert client.session_id is None
    with CapsuleClient(server.url) as capsule, pytest.raises(GoneError):
        capsule.get(str(session))


def test_the_module_has_the_seeds_name() -> None:
    from capsule_sdk.sandbox_client import SandboxClient as Same

    assert Same is SandboxClient


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


def test_a_session_is_taken_up_by_its_id(agent: SandboxClient, server: RealServer) -> None:
    agent.upload("f", b"kept")
    other = SandboxClient(server.url, session_id=agent.session_id)
    assert other.execute("cat f")["output"] == "kept"
    other.close()


def test_a_timeout_is_a_result(agent: SandboxClient) -> None:
    result = agent.execute("sleep 60", timeout=0.2)
    assert result == {"exit_code": 124, "output": "[capsule: timed out after 0.2 seconds]\n"}


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


def test_cleaning_up_what_is_over_is_fine(agent: SandboxClient, server: RealServer) -> None:
    with CapsuleClient(server.url) as capsule:
        capsule.get(str(agent.session_id)).delete()
    agent.cleanup()
    agent.cleanup()


def test_no_server_is_told() -> None:
    with pytest.raises(UnavailableError):
        SandboxClient(f"http://127.0.0.1:{free_port()}", retries=0).create_session()
