"""`client.sessions`, of both clients, with a real server."""

from __future__ import annotations

import hashlib

import pytest

from capsule_sdk import (
    AsyncCapsuleClient,
    CapsuleClient,
    ConflictError,
    GoneError,
    InvalidError,
    NotFoundError,
)

pytestmark = pytest.mark.real

CODE = "x = 41; open('artifacts/out.bin', 'wb').write(bytes(range(256)) * 4); print('hi')\nx + 1"


def test_a_session_from_its_begin_to_its_end(client: CapsuleClient) -> None:
    sessions = client.sessions
    made = sessions.create("Python3", session_id="sdk-one", metadata={"for": "tests"})
    assert (made.session_id, made.state, made.metadata) == ("sdk-one", "open", {"for": "tests"})
    assert made.sandbox_id and made.url.endswith(f"/v1/sandboxes/{made.sandbox_id}")
    with pytest.raises(ConflictError, match="sdk-one exists already"):
        sessions.create("Python3", session_id="sdk-one")
    done = sessions.execute("sdk-one", CODE)
    assert (done.status, done.stdout, done.text, done.execution) == ("ok", "hi\n", "42", 1)
    (artifact,) = done.artifacts
    assert (artifact.name, artifact.size) == ("out.bin", 1024)
    content = sessions.read_artifact("sdk-one", artifact.id)
    assert hashlib.sha256(content).hexdigest() == artifact.sha256
    assert b"".join(sessions.stream_artifact("sdk-one", artifact.id)) == content
    assert sessions.artifacts("sdk-one") == [artifact]
    assert sessions.write_file("sdk-one", "a/notes.txt", "hä").size == 3
    sessions.write_file("sdk-one", "raw", b"\xff\x00")
    assert sessions.read_file("sdk-one", "raw") == b"\xff\x00"
    assert sessions.read_file("sdk-one", "/workspace/a/notes.txt").decode() == "hä"
    assert {each.name for each in sessions.files("sdk-one")} == {"a", "artifacts", "raw"}
    below = sessions.files("sdk-one", recursive=True)
    assert "/workspace/a/notes.txt" in [each.path for each in below]
    closed = sessions.close("sdk-one")
    assert closed.state == "closed" and closed.workspace["kept"] == "snapshot"
    again = sessions.reopen("sdk-one")
    assert again.state == "open" and again.sandbox_id != made.sandbox_id
    assert sessions.read_file("sdk-one", "raw") == b"\xff\x00"
    assert "sdk-one" in [each.session_id for each in sessions.list(state="open")]
    sessions.delete("sdk-one")
    assert sessions.get("sdk-one").state == "deleted"
    assert [entry["status"] for entry in sessions.executions("sdk-one")] == ["ok"]
    with pytest.raises(GoneError):
        sessions.execute("sdk-one", "1")


def test_what_code_did_is_a_result_and_what_was_asked_wrongly_an_error(
    client: CapsuleClient,
) -> None:
    sessions = client.sessions
    id = sessions.create("Python3").session_id
    failed = sessions.execute(id, "1 / 0")
    assert failed.status == "error" and failed.error is not None
    assert failed.error.name == "ZeroDivisionError"
    assert sessions.execute(id, "while True: pass", timeout=0.3).status == "timed_out"
    assert [tool["name"] for tool in sessions.tools(id)]
    with pytest.raises(NotFoundError):
        sessions.call_tool(id, "no_such_tool")
    with pytest.raises(InvalidError, match="timeout=-1"):
        sessions.execute(id, "1", timeout=-1)
    with pytest.raises(NotFoundError):
        sessions.get("../v1/sandboxes")
    sessions.delete(id, purge=True)


async def test_the_same_for_asyncio(async_client: AsyncCapsuleClient) -> None:
    sessions = async_client.sessions
    id = (await sessions.create("Python3")).session_id
    done = await sessions.execute(id, CODE)
    assert done.text == "42"
    pieces = [piece async for piece in sessions.stream_artifact(id, done.artifacts[0].id)]
    assert sum(map(len, pieces)) == 1024
    assert (await sessions.close(id)).state == "closed"
    assert (await sessions.reopen(id)).state == "open"
    await sessions.delete(id)
