"""Stateful sessions against a real server: the promised fields, and what outlives a sandbox."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.api.client import Api
from tests.support import eventually
from tests.support.servers import RealServer

pytestmark = pytest.mark.real

# The first description of this interface, word for word. A session's id may be its creator's
# choice; "xyz" stands for the sandbox's id.
CREATE = """curl -X POST http://localhost:8000/api/sessions \\
  -d '{"environment": "Python3", "provider": "e2b"}'"""
EXECUTE = """curl -X POST http://localhost:8000/api/e2b/execute \\
  -d '{"session_id": "abc-123", "code": "print(42)"}'"""
DESTROY = "curl -X DELETE http://localhost:8000/api/sessions/abc-123?sandbox_id=xyz"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Session:
    def __init__(self, http: httpx.AsyncClient, started: dict[str, Any]) -> None:
        self.http = http
        self.started = started
        self.id = started["session_id"]
        self.path = f"/api/sessions/{self.id}"

    async def execute(self, code: str, **more: Any) -> dict[str, Any]:
        body = {"session_id": self.id, "code": code, **more}
        return await ok(self.http.post("/api/e2b/execute", json=body))

    async def tool(self, name: str, **arguments: Any) -> dict[str, Any]:
        answer = self.http.post(f"{self.path}/tools/{name}", json={"arguments": arguments})
        return await ok(answer)

    async def get(self, what: str = "") -> dict[str, Any]:
        return await ok(self.http.get(self.path + what))

    async def post(self, verb: str) -> dict[str, Any]:
        return await ok(self.http.post(f"{self.path}/{verb}"))


async def ok(answer: Any) -> dict[str, Any]:
    response: httpx.Response = await answer
    assert response.is_success, response.text
    body: dict[str, Any] = response.json()
    return body


async def begin(api: Api, **wish: Any) -> Session:
    return Session(api.http, await ok(api.http.post("/api/sessions", json=wish)))


@pytest.fixture
async def session(api: Api) -> AsyncIterator[Session]:
    made = await begin(api, environment="Python3")
    yield made
    await api.http.delete(made.path, params={"purge": "true"})


def paste(command: str, server: RealServer, **names: str) -> Any:
    """Run it in a shell as it stands, but for the port and names from the answer before it."""
    for name, value in {"localhost:8000": f"localhost:{server.port}", **names}.items():
        command = command.replace(name, value)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=15)
    assert done.returncode == 0, done.stderr
    return httpx.Response(200, text=done.stdout).json()


def test_the_first_curl_examples_work(server: RealServer) -> None:
    made = paste(CREATE, server)
    assert list(made) == ["session_id", "sandbox_id", "provider", "url"]
    assert made["provider"] == "local"
    assert made["url"] == f"http://localhost:{server.port}/v1/sandboxes/{made['sandbox_id']}"
    names = {"abc-123": made["session_id"], "xyz": made["sandbox_id"]}
    did = paste(EXECUTE, server, **names)
    assert list(did)[:4] == ["stdout", "stderr", "results", "artifacts"]
    assert (did["stdout"], did["stderr"], did["results"], did["artifacts"]) == ("42\n", "", [], [])
    wrong = paste(DESTROY, server, **{"abc-123": made["session_id"]})
    assert wrong["error"]["code"] == "conflict" and "'xyz'" in wrong["error"]["message"]
    assert paste(DESTROY, server, **names)["deleted"] is True
    with httpx.Client(verify=False, base_url=server.url) as http:
        assert http.get(f"/v1/sandboxes/{made['sandbox_id']}").status_code == 410
        assert http.get(f"/api/sessions/{made['session_id']}").json()["state"] == "deleted"


async def test_a_session_may_have_a_chosen_id_and_another_environment(api: Api) -> None:
    chosen = await begin(api, session_id="chosen-1", environment="python:latest")
    assert (chosen.id, (await chosen.get())["template"]) == ("chosen-1", "python")
    again = await api.http.post("/api/sessions", json={"session_id": "chosen-1"})
    assert again.status_code == 409 and "chosen-1 exists" in again.text
    other = await begin(api, environment="Bash", metadata={"team": "blue"})
    assert (await other.get())["environment"] == "bash"
    after = {"after": chosen.id, "limit": 1}
    (found,) = (await ok(api.http.get("/api/sessions", params=after)))["sessions"]
    assert found["session_id"] == other.id and found["metadata"] == {"team": "blue"}
    for session in (chosen, other):
        await api.http.delete(session.path)
    unknown = await api.http.post("/api/sessions", json={"environment": "cobol"})
    assert unknown.status_code == 404 and "python" in unknown.json()["error"]["hint"]
    assert (await api.http.post("/api/sessions", json={"provider": "no"})).status_code == 404
    assert (await api.http.get("/api/sessions", params={"state": "no"})).status_code == 400
    assert (await api.http.get("/api/sessions", params={"after": "no"})).status_code == 404
    for id in ("nope", "../x"):
        body = {"session_id": id, "code": "1"}
        answer = await api.http.post("/api/e2b/execute", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_files_are_written_and_read(session: Session) -> None:
    raw = bytes(range(256))
    url = f"/api/e2b/files/{session.id}"
    one = {"session_id": session.id, "path": "data/in.txt", "content": "héllo"}
    written = await ok(session.http.post("/api/e2b/files", json=one))
    assert written["files"] == [{"path": "/workspace/data/in.txt", "size": 6}]
    files = [
        {"path": "a.bin", "content": base64.b64encode(raw).decode(), "encoding": "base64"},
        {"path": "/workspace/b.txt", "content": "b"},
    ]
    several = {"session_id": session.id, "files": files}
    await ok(session.http.post("/api/e2b/files", json=several))
    listed = (await ok(session.http.get(url)))["files"]
    names = {"/workspace/artifacts", "/workspace/data", "/workspace/a.bin", "/workspace/b.txt"}
    assert {each["path"] for each in listed} == names
    assert set(listed[0]) == {"name", "path", "type", "size", "modified_at"}
    read = await ok(session.http.get(url, params={"path": "data/in.txt"}))
    assert (read["content"], read["encoding"]) == ("héllo", "text")
    read = await ok(session.http.get(url, params={"path": "a.bin"}))
    assert read["encoding"] == "base64" and base64.b64decode(read["content"]) == raw
    bad = await session.http.post("/api/e2b/files", json={"session_id": session.id, "path": "x"})
    assert bad.status_code == 400 and "content: missing" in bad.text


async def test_code_runs_as_in_a_notebook(session: Session) -> None:
    assert (await session.execute("x = 20\nx + 1"))["results"][0]["text"] == "21"
    raised = await session.execute("print(x)\n1 / 0")
    assert raised["status"] == "error" and raised["stdout"] == "20\n"
    assert raised["error"]["name"] == "ZeroDivisionError"
    assert raised["stderr"].endswith("ZeroDivisionError: division by zero\n")
    late = await session.execute("import time; time.sleep(30)", timeout_ms=300)
    assert late["status"] == "timed_out"
    assert (await session.execute("echo $((6*7))", language="bash"))["stdout"] == "42\n"
    assert (await session.tool("run_python", code="x * 2"))["results"][0]["text"] == "40"


async def test_files_and_pictures_become_artifacts(session: Session) -> None:
    code = "import os; os.makedirs('artifacts/deep'); open('artifacts/deep/r.csv','w').write('a,b')"
    (artifact,) = (await session.execute(code + "; os.symlink('/etc/passwd', 'artifacts/link')"))[
        "artifacts"
    ]
    fields = ["id", "name", "mime", "size", "sha256", "source", "created_at", "url"]
    assert list(artifact) == fields
    assert (artifact["name"], artifact["mime"], artifact["size"]) == ("deep/r.csv", "text/csv", 3)
    assert artifact["sha256"] == hashlib.sha256(b"a,b").hexdigest()
    assert (await session.execute("1"))["artifacts"] == [], "it was in an answer before"
    changed = await session.execute("open('artifacts/deep/r.csv','a').write('!')")
    assert [each["size"] for each in changed["artifacts"]] == [4]
    for wanted, status, part in (("", 200, b"a,b"), ("bytes=1-1", 206, b",")):
        got = await session.http.get(artifact["url"], headers={"range": wanted})
        assert (got.status_code, got.content) == (status, part), "what it was then"
    none = await session.http.get(artifact["url"], headers={"range": "bytes=9-"})
    assert none.status_code == 416 and none.headers["content-range"] == "bytes */3"
    did = await session.execute(f"class P:\n  def _repr_png_(self): return {PNG!r}\nP()")
    assert base64.b64decode(did["results"][0]["png"]) == PNG
    (picture,) = did["artifacts"]
    assert (picture["mime"], picture["source"]) == ("image/png", "result")
    answer = await session.http.get(picture["url"])
    assert answer.content == PNG and answer.headers["content-type"] == "image/png"
    assert (await session.get())["artifacts"] == 3
    assert (await session.http.get(f"{session.path}/artifacts/..%2f..")).status_code == 404


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("page.html", "page.html"),
        ('a"; x=".html', "a__ x__.html"),
        ("ü\nSet-Cookie: a=b.svg", "__Set-Cookie_ a_b.svg"),
        ("...", "artifact"),
    ],
)
async def test_a_download_is_never_a_page_of_the_server(
    session: Session, name: str, safe: str
) -> None:
    did = await session.execute(f"open('artifacts/' + {name!r}, 'w').write('<script>1</script>')")
    (artifact,) = did["artifacts"]
    answer = await session.http.get(artifact["url"])
    assert answer.text == "<script>1</script>"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("sandbox")
    disposition = answer.headers["content-disposition"]
    assert disposition.startswith(f"attachment; filename=\"{safe}\"; filename*=UTF-8''")
    assert "set-cookie" not in answer.headers
    tag = {"if-none-match": answer.headers["etag"]}
    assert (await session.http.get(artifact["url"], headers=tag)).status_code == 304


async def test_the_log_has_every_run(session: Session) -> None:
    await session.execute("print('one')")
    await session.execute("print('x' * 200_000)")
    await session.tool("count_words", text="a b")
    log = (await session.get("/executions"))["executions"]
    assert [each["execution"] for each in log] == [1, 2, 3]
    assert [each["kind"] for each in log] == ["code", "code", "tool"]
    one = log[0]
    assert (one["command"], one["stdout"], one["stderr"]) == ("print('one')", "one\n", "")
    assert (one["status"], one["stdout_bytes"], one["command_bytes"]) == ("ok", 4, 12)
    assert one["duration_ms"] > 0 and one["sandbox_id"] == session.started["sandbox_id"]
    assert re.fullmatch("[0-9a-f]{64}", one["hash"])
    assert {each["actor"] for each in log} == {"local"}
    assert (len(log[1]["stdout"]), log[1]["stdout_bytes"]) == (64 * 1024, 200_001)
    assert (log[2]["tool"], log[2]["command"]) == ("count_words", '{"text": "a b"}')
    later = await session.get("/executions?after=2")
    assert [each["execution"] for each in later["executions"]] == [3]


async def test_a_closed_session_is_opened_again_with_its_files(session: Session) -> None:
    await session.execute("x = 1; open('kept.txt', 'w').write('kept')")
    first = session.started["sandbox_id"]
    closed = await session.post("close")
    assert (closed["state"], closed["sandbox_id"], closed["url"]) == ("closed", "", "")
    assert closed["workspace"]["kept"] == "snapshot"
    assert closed["workspace"]["not_kept"] == ["processes", "variables"]
    assert closed["sandboxes"] == [first]
    assert (await session.http.get(f"/v1/sandboxes/{first}")).status_code == 410
    body = {"session_id": session.id, "code": "1"}
    refused = await session.http.post("/api/e2b/execute", json=body)
    assert refused.status_code == 409 and "reopen it" in refused.json()["error"]["hint"]
    opened = await session.post("reopen")
    assert opened["state"] == "open" and opened["sandbox_id"] != first
    did = await session.execute("print(open('kept.txt').read()); x")
    assert did["stdout"] == "kept\n" and did["error"]["name"] == "NameError"
    assert (await session.get())["executions"] == 2, "one log for both sandboxes"


async def test_delete_keeps_log_and_artifacts_and_purge_removes_them(api: Api) -> None:
    session = await begin(api)
    did = await session.execute("open('artifacts/a','w').write('secret'); print('secret')")
    await session.post("close")
    gone = await ok(api.http.delete(session.path))
    assert gone == {"deleted": True, "session_id": session.id, "kept": ["log", "artifacts"]}
    left = (await ok(api.http.get("/v1/snapshots")))["snapshots"]
    assert [each for each in left if each["metadata"].get("session") == session.id] == []
    url = did["artifacts"][0]["url"]
    assert (await api.http.get(url)).text == "secret"
    assert (await api.http.delete(session.path)).status_code == 410
    assert (await api.http.post(f"{session.path}/reopen")).status_code == 410
    listed = (await ok(api.http.get("/api/sessions")))["sessions"]
    assert session.id not in [each["session_id"] for each in listed]
    purged = await ok(api.http.delete(session.path, params={"purge": "true"}))
    assert purged["kept"] == []
    assert (await api.http.get(url)).status_code == 404
    (logged,) = (await session.get("/executions"))["executions"]
    assert logged["stdout"] is None and logged["command"] is None
    assert logged["stdout_bytes"] == 7, "that it ran is still known"


async def test_an_unused_session_is_closed_with_its_files(api: Api) -> None:
    session = await begin(api, idle_timeout_ms=1000)

    async def closed() -> bool:
        return bool((await session.get())["state"] == "closed")

    await eventually(closed, what="it is closed")
    about = await session.get()
    assert about["reason"] == "it was not used" and about["workspace"]["kept"] == "snapshot"
    await api.http.delete(session.path)


async def test_a_session_of_an_agent_has_its_tools_and_limits(api: Api) -> None:
    session = await begin(api, agent="text_worker")
    about = await session.get()
    assert (about["agent"], about["environment"]) == ("text_worker", "bash")
    box = await ok(api.http.get(f"/v1/sandboxes/{session.started['sandbox_id']}"))
    assert box["limits"]["memory"] == 128 * 1024 * 1024
    tools = await ok(api.http.get(f"{session.path}/tools", params={"format": "anthropic"}))
    assert [each["name"] for each in tools["tools"]][:2] == ["count_words", "checksum"]
    assert set(tools["tools"][0]) == {"name", "description", "input_schema"}
    assert (await session.tool("count_words", text="a b c"))["stdout"].split() == ["0", "3", "5"]
    body = {"arguments": {"command": "id"}}
    refused = await api.http.post(f"{session.path}/tools/run_command", json=body)
    assert refused.status_code == 403 and "count_words" in refused.json()["error"]["hint"]
    await api.http.delete(f"/v1/sandboxes/{box['id']}")
    about = await session.get()
    assert about["state"] == "closed" and "deleted" in about["reason"]
    assert about["workspace"]["kept"] == "none" and "files" in about["workspace"]["not_kept"]
    await api.http.delete(session.path)


async def test_arguments_are_data_and_never_words_of_a_command(session: Session) -> None:
    hostile = "'; touch /workspace/pwned; $(touch /workspace/pwned) `touch pwned` #"
    did = await session.tool("checksum", text=hostile)
    assert did["stdout"].split()[0] == hashlib.sha256(hostile.encode()).hexdigest()
    path = f"{hostile[:8]}/f"
    assert (await session.tool("write_file", path=path, content=hostile))["status"] == "ok"
    assert (await session.tool("read_file", path=path))["stdout"] == hostile
    listed = (await session.tool("list_files"))["stdout"].splitlines()
    assert f"/workspace/{path}" in listed and "/workspace/pwned" not in listed
    for name, arguments, field in (
        ("count_words", {}, "arguments"),
        ("count_words", {"text": 3}, "arguments.text"),
        ("count_words", {"text": "a", "more": 1}, "arguments"),
        ("run_python", {"code": ""}, "arguments.code"),
    ):
        url, body = f"{session.path}/tools/{name}", {"arguments": arguments}
        answer = await session.http.post(url, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["details"]["field"] == field


async def test_the_registry_can_be_read(api: Api) -> None:
    everything = await ok(api.http.get("/api/registry"))
    assert list(everything) == ["environments", "agents", "tools", "prompts", "problems"]
    assert everything["problems"] == []
    assert {"python", "node"} <= {each["name"] for each in everything["environments"]}
    agent = await ok(api.http.get("/api/registry/agents/code_executor"))
    assert agent["environment"] == "python" and "run_python" in agent["tools"]
    tool = await ok(api.http.get("/api/registry/tools/run_python", params={"format": "openai"}))
    assert tool["type"] == "function" and tool["function"]["parameters"]["required"] == ["code"]
    prompt = await ok(api.http.get("/api/registry/prompts/code_executor"))
    assert "run_python" in prompt["text"]
    assert (await api.http.get("/api/registry/tools/none")).status_code == 404
    assert (await api.http.get("/api/registry/nothing")).status_code == 400
    assert (await api.http.put("/api/registry/tools/x", json={})).status_code == 405


@pytest.mark.parametrize("path", ["/api/sessions", "/execute", "/api/playground/sync"])
async def test_what_curl_calls_a_form_is_taken_from_curl_alone(api: Api, path: str) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers, status in (
        ({**form, "user-agent": "Mozilla/5.0"}, 415),
        ({**form, "referer": "http://evil.example/"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({**form, "origin": "http://evil.example"}, 403),
    ):
        answer = await api.http.post(path, content=b"{}", headers=headers)
        assert answer.status_code == status, headers
    taken = await api.http.post(path, content=b'{"x": 1}', headers=form)
    assert taken.status_code == 400 and "x" in taken.json()["error"]["message"], taken.text
    strict = await api.http.post("/v1/sandboxes", content=b"{}", headers=form)
    assert strict.status_code == 415
