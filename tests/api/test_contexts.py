"""Contexts over JSON-RPC, REST and Server-Sent Events, in real sandboxes: shapes and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.client import Api, RpcFailure, SseEvent, events

pytestmark = pytest.mark.real


@pytest.fixture
async def python(api: Api) -> AsyncIterator[str]:
    """The id of a sandbox with Python."""
    created = await api.rpc("create", template="python", ttl_ms=60_000)
    yield created["id"]
    await api.http.delete(f"/v1/sandboxes/{created['id']}")


async def call(api: Api, method: str, **params: Any) -> Any:
    return await api.call(f"context.v1.{method}", params)


async def test_a_context_from_create_to_delete(api: Api, python: str) -> None:
    made = await call(api, "create", id=python, language="py", cwd="/tmp", imports=["json"])
    context = made["id"]
    assert (made["language"], made["state"], made["cwd"]) == ("python", "idle", "/tmp")
    (info,) = (await api.rpc("execs", id=python))["execs"]
    assert (info["exec_id"], info["running"]) == (made["exec_id"], True)
    assert info["cmd"] == ["python3", "-u", "-c", "<kernel>"]
    await call(api, "run", id=python, context=context, code="x = 20")
    done = await call(api, "run", id=python, context=context, code="print('hi')\nx + 1")
    assert (done["status"], done["stdout"], done["stderr"]) == ("ok", "hi\n", "")
    assert done["results"] == [{"is_main": True, "text": "21"}]
    assert (done["run"], done["context"], done["state"]) == (2, context, "idle")
    assert done["error"] is None and isinstance(done["duration_ms"], float)
    (listed,) = (await call(api, "list", id=python))["contexts"]
    assert (listed["id"], listed["runs"], listed["lost_run"]) == (context, 2, None)
    fresh = await call(api, "restart", id=python, context=context)
    assert (fresh["id"], fresh["state"]) == (context, "idle")
    gone = await call(api, "run", id=python, context=context, code="x")
    assert gone["error"]["name"] == "NameError"
    assert await call(api, "interrupt", id=python, context=context) == {"interrupted": False}
    assert await call(api, "delete", id=python, context=context) == {"deleted": True}
    assert await call(api, "list", id=python) == {"contexts": []}
    with pytest.raises(RpcFailure) as failure:
        await call(api, "run", id=python, context=context, code="x")
    assert failure.value.code == "not_found"


async def test_a_timeout_and_a_death_are_data(api: Api, python: str) -> None:
    late = await call(api, "run", id=python, code="while True: pass", timeout_ms=200)
    assert (late["status"], late["state"]) == ("timed_out", "idle")
    dead = await call(api, "run", id=python, code="import os; os._exit(3)")
    why = "its interpreter exited with code 3"
    assert (dead["status"], dead["state"], dead["reason"]) == ("died", "dead", why)
    assert dead["error"] == {"name": "InterpreterDied", "value": why, "traceback": ""}
    with pytest.raises(RpcFailure) as failure:
        await call(api, "run", id=python, code="1")
    assert (failure.value.code, failure.value.details["state"]) == ("wrong_state", "dead")


async def test_a_wrong_request_is_refused(api: Api, python: str, box: str) -> None:
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"code": 5}, "invalid", "code"),
        ({"code": "1", "timeout_ms": 0}, "invalid", "timeout_ms"),
        ({"code": "1", "language": "cobol"}, "not_found", "cobol"),
        ({"code": "1", "other": 1}, "invalid", "other"),
        ({"id": box, "code": "1", "language": "sh"}, "unsupported", "has no live interpreter"),
    ]
    for params, code, word in bad:
        with pytest.raises(RpcFailure) as failure:
            await call(api, "run", **{"id": python, **params})
        assert failure.value.code == code
        assert word in failure.value.message


async def follow(api: Api, path: str, **body: Any) -> list[SseEvent]:
    headers = {"Accept": "text/event-stream"}
    async with api.http.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        return [event async for event in events(answer)]


async def test_contexts_over_rest(api: Api, python: str) -> None:
    base = f"/v1/sandboxes/{python}/contexts"
    made = await api.http.post(base, json={"language": "python"})
    assert made.status_code == 201
    context = f"{base}/{made.json()['id']}"
    assert (await api.http.post(f"{context}/run", json={"code": "x = 6"})).json()["status"] == "ok"
    done = (await api.http.post(f"{context}/run", json={"code": "x * 7"})).json()
    assert done["results"] == [{"is_main": True, "text": "42"}]
    default = await api.http.post(f"{base}/run", json={"code": "echo hi; false", "language": "sh"})
    assert (default.json()["context"], default.json()["exit_code"]) == ("default-bash", 1)
    listed = (await api.http.get(base)).json()["contexts"]
    assert [each["language"] for each in listed] == ["python", "bash"]
    assert (await api.http.post(f"{context}/interrupt")).json() == {"interrupted": False}
    assert (await api.http.post(f"{context}/restart")).json()["state"] == "idle"
    assert (await api.http.delete(context)).json() == {"deleted": True}
    assert (await api.http.delete(context)).status_code == 404
    wrong = await api.http.post(f"{base}/default-bash/run", json={"code": "1", "language": "py"})
    assert (wrong.status_code, wrong.json()["error"]["details"]["field"]) == (400, "language")


async def test_a_run_as_events(api: Api, python: str) -> None:
    code = """
import sys
print("out", end=""); sys.stdout.flush()
display("shown")
sys.stderr.write("é\\n")
7
"""
    seen = await follow(api, f"/v1/sandboxes/{python}/contexts/run", code=code)
    names = [event.name for event in seen if event.name != "stderr"]
    assert names == ["started", "stdout", "display", "result", "end"]
    by_name = {event.name: event.data for event in seen}
    assert by_name["started"] == {"context": "default-python", "run": 1}
    assert (by_name["stdout"], by_name["stderr"]) == ({"data": "out"}, {"data": "é\n"})
    assert by_name["display"] == {"is_main": False, "text": "'shown'"}
    assert by_name["result"] == {"is_main": True, "text": "7"}
    assert (by_name["end"]["status"], by_name["end"]["state"]) == ("ok", "idle")
    dead = await follow(api, f"/v1/sandboxes/{python}/contexts/run", code="import os; os._exit(1)")
    assert [event.name for event in dead] == ["started", "error", "end"]
    assert (dead[-1].data["status"], dead[-1].data["state"]) == ("died", "dead")


async def test_the_end_of_the_sandbox_ends_the_events(api: Api, python: str) -> None:
    path = f"/v1/sandboxes/{python}/contexts/run"
    body = {"code": "print('on', flush=True)\nimport time; time.sleep(30)"}
    headers = {"Accept": "text/event-stream"}
    seen: list[str] = []
    async with api.http.stream("POST", path, json=body, headers=headers) as answer:
        async for event in events(answer):
            if event.name == "stdout" and "stdout" not in seen:
                await api.rpc("delete", id=python)
            seen.append(event.name)
    assert list(dict.fromkeys(seen)) == ["started", "stdout", "failed"]
    assert event.data["code"] == "gone"
