"""Every method of JSON-RPC against real sandboxes: what it takes and what it answers."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.api.client import Api, RpcFailure, b64

pytestmark = pytest.mark.real


async def test_the_answer_of_create(api: Api) -> None:
    result = await api.rpc("create", template="python", ttl_ms=600_000)
    try:
        assert list(result)[:4] == ["id", "template", "created_at", "expires_at"]
        assert result["template"] == "python"
        created, expires = (datetime.fromisoformat(result[k]) for k in ("created_at", "expires_at"))
        assert result["created_at"].endswith("Z")
        assert expires - created == timedelta(minutes=10)
        assert result["state"] == "running"
        assert result["isolation"] in ("namespaces", "landlock")
        assert isinstance(result["unenforced"], list)
    finally:
        assert await api.rpc("delete", id=result["id"]) == {"deleted": True}
    with pytest.raises(RpcFailure) as failure:
        await api.rpc("exec", id=result["id"], cmd=["true"])
    assert failure.value.code == "gone"


async def test_the_answer_of_exec(api: Api, box: str) -> None:
    options: dict[str, Any] = {"env": {"GREETING": "hi"}, "cwd": "/tmp", "stdin": "typed\n"}
    result = await api.rpc("exec", id=box, cmd="cat; echo $GREETING; pwd", **options)
    assert list(result)[:5] == ["stdout", "stderr", "exit_code", "timed_out", "duration_ms"]
    assert (result["stdout"], result["stderr"]) == ("typed\nhi\n/tmp\n", "")
    assert (result["exit_code"], result["timed_out"], result["reason"]) == (0, False, "exited")
    assert isinstance(result["duration_ms"], int) and result["exec_id"]


async def test_what_the_program_did_is_data(api: Api, box: str) -> None:
    failed = await api.rpc("exec", id=box, cmd=["sh", "-c", "echo no >&2; exit 3"])
    killed = await api.rpc("exec", id=box, cmd=["sh", "-c", "kill -9 $$"])
    late = await api.rpc("exec", id=box, cmd=["sleep", "30"], timeout_ms=200)
    assert (failed["exit_code"], failed["stderr"]) == (3, "no\n")
    assert (killed["reason"], killed["signal"], killed["exit_code"]) == ("signaled", 9, 137)
    assert (late["reason"], late["timed_out"]) == ("timed_out", True)
    with pytest.raises(RpcFailure) as failure:
        await api.rpc("exec", id=box, cmd=["no-such-program"])
    assert failure.value.code == "not_found"
    assert "no-such-program" in failure.value.message


async def test_bytes_that_are_no_text(api: Api, box: str) -> None:
    cmd = ["printf", r"a\377\000b"]
    text = await api.rpc("exec", id=box, cmd=cmd)
    raw = await api.rpc("exec", id=box, cmd=cmd, encoding="base64")
    assert text["stdout"] == "a�\x00b"
    assert raw["stdout"] == b64(b"a\xff\x00b")
    assert text["stdout_bytes"] == raw["stdout_bytes"] == 4
    data = bytes(range(256))
    result = await api.rpc("exec", id=box, cmd=["cat"], stdin_base64=b64(data), encoding="base64")
    assert result["stdout"] == b64(data)


async def test_run_takes_code_and_sessions_carry_on(api: Api, box: str) -> None:
    await api.rpc("run", id=box, code="cd /tmp; export COLOUR=green", session="s")
    result = await api.rpc("exec", id=box, cmd="pwd; echo $COLOUR", session="s")
    other = await api.rpc("exec", id=box, cmd="echo $COLOUR", session="t")
    assert result["stdout"] == "/tmp\ngreen\n"
    assert other["stdout"] == "\n"


async def test_batch_runs_in_order_and_stops_at_a_failure(api: Api, box: str) -> None:
    commands: list[Any] = [
        {"cmd": "echo one > f"},
        {"code": "cat f"},
        {"cmd": ["false"]},
        {"cmd": "echo never"},
    ]
    stopped = await api.rpc("batch", id=box, commands=commands)
    all_of_it = await api.rpc("batch", id=box, commands=commands, stop_on_error=False)
    assert [r["exit_code"] for r in stopped["results"]] == [0, 0, 1]
    assert stopped["stopped"] is True
    assert stopped["results"][1]["stdout"] == "one\n"
    assert [r["exit_code"] for r in all_of_it["results"]] == [0, 0, 1, 0]
    assert all_of_it["stopped"] is False


async def test_files_by_rpc(api: Api, box: str) -> None:
    content = "print('hello')"
    path = "/workspace/app.py"
    written = await api.rpc("writeFile", id=box, path=path, content=b64(content.encode()))
    read = await api.rpc("readFile", id=box, path=path)
    part = await api.rpc("readFile", id=box, path=path, offset=7, length=5, encoding="text")
    listed = await api.rpc("listDir", id=box, path="/workspace")
    assert written == {"path": path, "size": 14}
    assert read == {"content": b64(content.encode()), "size": 14}
    assert part["content"] == "hello"
    entry = next(e for e in listed["entries"] if e["name"] == "app.py")
    assert entry["path"] == path
    assert (entry["type"], entry["is_dir"], entry["size"]) == ("file", False, 14)
    assert entry["mode"] & 0o777 == 0o644
    assert entry["mtime"] > 1.6e9
    await api.sh(box, "truncate -s 20M big")
    with pytest.raises(RpcFailure) as failure:
        await api.rpc("readFile", id=box, path="big")
    assert failure.value.code == "too_large"


async def test_folders_moves_and_removal_by_rpc(api: Api, box: str) -> None:
    await api.rpc("mkdir", id=box, path="a/b/c")
    await api.rpc("writeFile", id=box, path="a/b/f", content="x", encoding="text", mode="600")
    await api.rpc("move", id=box, **{"from": "a/b/f", "to": "a/g"})
    stat = await api.rpc("stat", id=box, path="a/g")
    await api.rpc("chmod", id=box, path="a/g", mode=0o755)
    everything = await api.rpc("listDir", id=box, path="a", recursive=True)
    assert stat["mode"] & 0o777 == 0o600
    assert sorted(e["path"] for e in everything["entries"]) == [
        "/workspace/a/b",
        "/workspace/a/b/c",
        "/workspace/a/g",
    ]
    assert (await api.rpc("stat", id=box, path="a/g"))["mode"] & 0o777 == 0o755
    with pytest.raises(RpcFailure):
        await api.rpc("remove", id=box, path="a")
    await api.rpc("remove", id=box, path="a", recursive=True)
    with pytest.raises(RpcFailure) as failure:
        await api.rpc("stat", id=box, path="a")
    assert failure.value.code == "not_found"


async def test_get_list_and_timeouts(api: Api) -> None:
    wish = {"template": "bash", "metadata": {"owner": "t-list", "n": "1"}}
    made = await api.rpc("create", **wish, idempotency_key="once")
    try:
        assert (await api.rpc("create", **wish, idempotency_key="once"))["id"] == made["id"]
        with pytest.raises(RpcFailure) as failure:
            await api.rpc("create", template="bash", idempotency_key="once")
        assert failure.value.code == "conflict"
        status = await api.call("pool.v1.status", {})
        assert (status["shelves"], status["waiting"]) == ([], 0)
        later = await api.rpc("setTimeout", id=made["id"], ttl_ms=3_600_000)
        kept = await api.rpc("keepAlive", id=made["id"])
        assert made["expires_at"] < later["expires_at"] <= kept["expires_at"]
        usage = await api.rpc("metrics", id=made["id"])
        assert usage["source"] and {"memory_bytes", "cpu_ms"} <= usage.keys()
        found = await api.rpc("get", id=made["id"])
        listed = await api.rpc("list", metadata={"owner": "t-list"})
        none = await api.rpc("list", metadata={"owner": "t-list", "n": "2"})
        assert found["metadata"] == {"owner": "t-list", "n": "1"}
        assert [s["id"] for s in listed["sandboxes"]] == [made["id"]]
        assert none["sandboxes"] == []
    finally:
        await api.rpc("delete", id=made["id"])
    for method in ("get", "delete", "metrics", "execs", "keepAlive"):
        with pytest.raises(RpcFailure) as failure:
            await api.rpc(method, id="nosuchbox")
        assert failure.value.code == "not_found", method


async def test_a_reset_takes_everything_but_the_id(api: Api, box: str) -> None:
    await api.rpc("writeFile", id=box, path="a", content="x", encoding="text")
    await api.rpc("exec", id=box, cmd="cd /tmp; export A=1", session="s")
    left = await api.rpc("start", id=box, cmd="sleep 1000")
    before = await api.rpc("get", id=box)
    again = await api.rpc("reset", id=box)
    assert (again["id"], again["expires_at"]) == (box, before["expires_at"])
    assert again["started"] == "cold"
    assert (await api.rpc("listDir", id=box, path=".")) == {"entries": [], "truncated": False}
    ids = [each["exec_id"] for each in (await api.rpc("execs", id=box))["execs"]]
    assert left["exec_id"] not in ids
    found = await api.rpc("exec", id=box, cmd="pwd; echo [$A]", session="s")
    assert found["stdout"] == "/workspace\n[]\n"


async def test_start_attach_input_and_kill(api: Api, box: str) -> None:
    started = await api.rpc("start", id=box, cmd="read x; echo got $x", stdin_open=True)
    exec_id = started["exec_id"]
    listed = await api.rpc("execs", id=box)
    assert [e["running"] for e in listed["execs"] if e["exec_id"] == exec_id] == [True]
    quiet = await api.rpc("attach", id=box, exec_id=exec_id)
    assert (quiet["stdout"], quiet["running"], quiet["exit"]) == ("", True, None)
    await api.rpc("sendInput", id=box, exec_id=exec_id, data="something\n")
    seen = await to_the_end(api, box, exec_id)
    assert seen["stdout"] == "got something\n"
    assert seen["exit"]["exit_code"] == 0
    asleep = await api.rpc("start", id=box, cmd="sleep 60")
    assert await api.rpc("kill", id=box, exec_id=asleep["exec_id"]) == {"running": True}
    end = await to_the_end(api, box, asleep["exec_id"])
    assert end["exit"]["reason"] == "cancelled"


async def to_the_end(api: Api, box: str, exec_id: str) -> dict[str, Any]:
    """Poll until the exec ends, and put the parts together."""
    whole: dict[str, Any] = {"stdout": "", "stderr": "", "stdout_offset": 0, "stderr_offset": 0}
    while True:
        part = await api.rpc(
            "attach",
            id=box,
            exec_id=exec_id,
            stdout=whole["stdout_offset"],
            stderr=whole["stderr_offset"],
            wait_ms=5000,
        )
        for name in ("stdout", "stderr"):
            part[name] = whole[name] + part[name]
        whole = part
        if not part["running"]:
            return whole


async def test_the_older_methods(api: Api) -> None:
    made = await api.call("sandbox.create", {"template": "python"})
    id = made["sandbox_id"]
    try:
        assert made["id"] == id
        params = {"id": id, "code": "print(6 * 7)", "language": "python"}
        result = await api.call("sandbox.exec", params)
        assert result == {"stdout": "42\n", "stderr": "", "exit_code": 0}
    finally:
        await api.call("sandbox.delete", {"id": id})
    with pytest.raises(RpcFailure):
        await api.call("sandbox.exec", {"id": id, "code": "1"})


async def test_calls_in_a_batch_keep_the_order_of_each_sandbox(api: Api, box: str) -> None:
    batch = [
        {"jsonrpc": "2.0", "id": i, "method": "sandbox.v1.exec", "params": {"id": box, "cmd": cmd}}
        for i, cmd in enumerate(("echo 1 > f", "sleep 0.2; cat f", "echo 2 > f", "cat f"))
    ]
    answers = (await api.http.post("/rpc", json=batch)).json()
    assert [answer["id"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["result"]["stdout"] for answer in answers] == ["", "1\n", "", "2\n"]


async def test_notifications_have_an_effect_and_no_answer(api: Api, box: str) -> None:
    params = {"id": box, "path": "note", "content": "x", "encoding": "text"}
    note = {"jsonrpc": "2.0", "method": "sandbox.v1.writeFile", "params": params}
    for body in (note, [note, note]):
        answer = await api.http.post("/rpc", json=body)
        assert (answer.status_code, answer.content) == (204, b"")
    assert await api.sh(box, "cat note") == "x"


def test_every_method_has_a_test_beside_this(api_params: dict[str, list[str]]) -> None:
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    used = set(re.findall(r'rpc\(\s*"(\w+)"|"(sandbox\.\w+|\w+\.v1\.\w+)"', text))
    names = {a or b for a, b in used} | {"writeFile", "get", "delete", "metrics", "keepAlive"}
    names |= {f"context.v1.{name}" for name in re.findall(r'call\(api, "(\w+)"', text)}
    missing = [m for m in sorted(api_params) if m.removeprefix("sandbox.v1.") not in names]
    assert missing == []
