"""Stateful sessions against a real server: the shapes that were promised, field by field, and what
outlives a sandbox.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.api.client import Api
from tests.support import eventually
from tests.support.servers import RealServer

pytestmark = pytest.mark.real

# What the first description of this interface shows, word for word; the names in it stand for
# whatever the answer before it said.
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

    async def get(self) -> dict[str, Any]:
        return await ok(self.http.get(self.path))

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
    """Run it in a shell as it stands, but for the port and the names that stand for others."""
    for name, value in {"localhost:8000": f"localhost:{server.port}", **names}.items():
        command = command.replace(name, value)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=15)
    assert done.returncode == 0, done.stderr
    return httpx.Response(200, text=done.stdout).json()


def test_the_first_curl_examples_do_what_they_say(server: RealServer) -> None:
    made = paste(CREATE, server)
    assert list(made) == ["session_id", "sandbox_id", "provider", "url"]
    assert made["provider"] == "local"
    assert made["url"] == f"http://localhost:{server.port}/v1/sandboxes/{made['sandbox_id']}"
    names = {"abc-123": made["session_id"], "xyz": made["sandbox_id"]}
    did = paste(EXECUTE, server, **names)
    assert list(did)[:4] == ["stdout", "stderr", "results", "artifacts"]
    assert (did["stdout"], did["stderr"], did["results"], did["artifacts"]) == ("42\n", "", [], [])
    gone = paste(DESTROY, server, **names)
    assert gone["deleted"] is True
    with httpx.Client(verify=False, base_url=server.url) as http:
        assert http.get(f"/v1/sandboxes/{made['sandbox_id']}").status_code == 410
        assert http.get(f"/api/sessions/{made['session_id']}").json()["state"] == "deleted"


def test_the_examples_work_with_the_very_names_they_show(server: RealServer) -> None:
    """A session's id may be its creator's choice."""
    with httpx.Client(verify=False, base_url=server.url) as http:
        made = http.post(
            "/api/sessions", json={"session_id": "abc-123", "environment": "Python3"}
        ).json()
        assert made["session_id"] == "abc-123"
        again = http.post("/api/sessions", json={"session_id": "abc-123"})
        assert again.status_code == 409 and "abc-123 exists" in again.text
    assert paste(EXECUTE, server)["stdout"] == "42\n"
    wrong = paste(DESTROY, server)
    assert wrong["error"]["code"] == "conflict" and "'xyz'" in wrong["error"]["message"]
    assert paste(DESTROY, server, xyz=made["sandbox_id"])["deleted"] is True


async def test_get_and_post_of_files(session: Session) -> None:
    written = await ok(
        session.http.post(
            "/api/e2b/files",
            json={"session_id": session.id, "path": "data/in.txt", "content": "héllo"},
        )
    )
    assert written["files"] == [{"path": "/workspace/data/in.txt", "size": 6}]
    listed = await ok(session.http.get(f"/api/e2b/files/{session.id}"))
    assert {each["path"] for each in listed["files"]} == {"/workspace/artifacts", "/workspace/data"}
    assert set(listed["files"][0]) == {"name", "path", "type", "size", "modified_at"}
    where = {"path": "data/in.txt"}
    read = await ok(session.http.get(f"/api/e2b/files/{session.id}", params=where))
    assert (read["content"], read["encoding"]) == ("héllo", "text")
    assert (await session.execute("open('data/in.txt').read()"))["results"][0]["text"] == "'héllo'"


async def test_several_files_and_bytes_at_once(session: Session) -> None:
    raw = bytes(range(256))
    files = [
        {"path": "a.bin", "content": base64.b64encode(raw).decode(), "encoding": "base64"},
        {"path": "/workspace/b.txt", "content": "b"},
    ]
    body = {"session_id": session.id, "files": files}
    await ok(session.http.post("/api/e2b/files", json=body))
    read = await ok(session.http.get(f"/api/e2b/files/{session.id}", params={"path": "a.bin"}))
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


async def test_other_environments_and_their_other_names(api: Api) -> None:
    node = await begin(api, environment="Node")
    assert (await node.execute("console.log(6 * 7)"))["stdout"] == "42\n"
    assert (await node.get())["environment"] == "node"
    await node.http.delete(node.path)
    image = await begin(api, environment="python:latest")
    assert (await image.get())["template"] == "python"
    await image.http.delete(image.path)
    template = await begin(api, environment="go")
    assert (await template.get())["environment"] == "go"
    await template.http.delete(template.path)
    unknown = await api.http.post("/api/sessions", json={"environment": "cobol"})
    assert unknown.status_code == 404 and "python" in unknown.json()["error"]["hint"]
    unknown = await api.http.post("/api/sessions", json={"provider": "nowhere"})
    assert unknown.status_code == 404
    assert [s for s in (await ok(api.http.get("/api/sessions")))["sessions"] if "cobol" in s] == []


async def test_files_that_a_program_leaves_are_artifacts(session: Session) -> None:
    code = "import os; os.makedirs('artifacts/deep'); open('artifacts/deep/r.csv','w').write('a,b')"
    did = await session.execute(code)
    (artifact,) = did["artifacts"]
    assert list(artifact) == [
        *("id", "name", "mime", "size", "sha256", "source", "created_at", "url")
    ]
    assert (artifact["name"], artifact["mime"], artifact["size"]) == ("deep/r.csv", "text/csv", 3)
    assert artifact["sha256"] == hashlib.sha256(b"a,b").hexdigest()
    assert (await session.execute("1"))["artifacts"] == [], "told once"
    changed = await session.execute("open('artifacts/deep/r.csv','a').write('!')")
    assert [each["size"] for each in changed["artifacts"]] == [4]
    listed = (await session.get())["artifacts"]
    assert listed == 2
    content = await session.http.get(artifact["url"])
    assert content.content == b"a,b", "what it was then"
    for wanted, status, part in (
        ("bytes=1-1", 206, b","),
        ("bytes=-1", 206, b"b"),
        ("x", 200, b"a,b"),
    ):
        got = await session.http.get(artifact["url"], headers={"range": wanted})
        assert (got.status_code, got.content) == (status, part)
    none = await session.http.get(artifact["url"], headers={"range": "bytes=9-"})
    assert none.status_code == 416 and none.headers["content-range"] == "bytes */3"


async def test_pictures_that_results_carry_are_artifacts(session: Session) -> None:
    code = f"class P:\n  def _repr_png_(self): return {PNG!r}\nP()"
    did = await session.execute(code)
    assert base64.b64decode(did["results"][0]["png"]) == PNG
    (artifact,) = did["artifacts"]
    assert (artifact["mime"], artifact["source"]) == ("image/png", "result")
    answer = await session.http.get(artifact["url"])
    assert answer.content == PNG and answer.headers["content-type"] == "image/png"


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("page.html", "page.html"),
        ('a"; x=".html', "a__ x__.html"),
        ("ü\nSet-Cookie: a=b.svg", "__Set-Cookie_ a_b.svg"),
        ("...", "artifact"),
    ],
)
async def test_a_download_is_never_a_page_of_ours(session: Session, name: str, safe: str) -> None:
    did = await session.execute(f"open('artifacts/' + {name!r}, 'w').write('<script>1</script>')")
    (artifact,) = did["artifacts"]
    answer = await session.http.get(artifact["url"])
    assert answer.text == "<script>1</script>"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("sandbox")
    said = answer.headers["content-disposition"]
    assert said.startswith(f"attachment; filename=\"{safe}\"; filename*=UTF-8''")
    assert "set-cookie" not in answer.headers
    tag = {"if-none-match": answer.headers["etag"]}
    assert (await session.http.get(artifact["url"], headers=tag)).status_code == 304


async def test_links_and_others_artifacts_lead_nowhere(api: Api, session: Session) -> None:
    did = await session.execute("import os; os.symlink('/etc/passwd', 'artifacts/link')")
    assert did["artifacts"] == []
    did = await session.execute("open('artifacts/mine','w').write('1')")
    id = did["artifacts"][0]["id"]
    other = await begin(api)
    answer = await api.http.get(f"{other.path}/artifacts/{id}")
    assert answer.status_code == 404
    assert (await api.http.get(f"{session.path}/artifacts/..%2f..")).status_code == 404
    await api.http.delete(other.path)


async def test_the_log_tells_what_was_run(session: Session) -> None:
    await session.execute("print('one')")
    await session.execute("raise SystemExit(3)")
    await session.tool("count_words", text="a b")
    log = (await ok(session.http.get(f"{session.path}/executions")))["executions"]
    assert [each["execution"] for each in log] == [1, 2, 3]
    assert [each["kind"] for each in log] == ["code", "code", "tool"]
    one = log[0]
    assert (one["command"], one["stdout"], one["stderr"]) == ("print('one')", "one\n", "")
    assert (one["status"], one["stdout_bytes"], one["command_bytes"]) == ("ok", 4, 12)
    assert one["duration_ms"] > 0 and one["sandbox_id"] == session.started["sandbox_id"]
    assert re.fullmatch("[0-9a-f]{64}", one["hash"])
    assert {each["actor"] for each in log} == {"local"}
    assert log[2]["tool"] == "count_words" and log[2]["command"] == '{"text": "a b"}'
    later = await ok(session.http.get(f"{session.path}/executions", params={"after": 2}))
    assert [each["execution"] for each in later["executions"]] == [3]


async def test_the_log_keeps_output_within_its_cap(session: Session) -> None:
    did = await session.execute("print('x' * 200_000)")
    assert len(did["stdout"]) == 200_001
    (logged,) = (await ok(session.http.get(f"{session.path}/executions")))["executions"]
    assert len(logged["stdout"]) == 64 * 1024 and logged["stdout_bytes"] == 200_001


async def test_a_closed_session_is_opened_again_with_its_files(session: Session) -> None:
    await session.execute("x = 1; open('kept.txt', 'w').write('kept')")
    closed = await session.post("close")
    assert (closed["state"], closed["sandbox_id"], closed["url"]) == ("closed", "", "")
    assert closed["workspace"]["kept"] == "snapshot"
    assert closed["workspace"]["not_kept"] == ["processes", "variables"]
    assert closed["sandboxes"] == [session.started["sandbox_id"]]
    old = await session.http.get(f"/v1/sandboxes/{session.started['sandbox_id']}")
    assert old.status_code == 410
    refused = await session.http.post(
        "/api/e2b/execute", json={"session_id": session.id, "code": "1"}
    )
    assert refused.status_code == 409 and "reopen it" in refused.json()["error"]["hint"]
    opened = await session.post("reopen")
    assert opened["state"] == "open" and opened["sandbox_id"] != session.started["sandbox_id"]
    did = await session.execute("print(open('kept.txt').read()); x")
    assert did["stdout"] == "kept\n" and did["error"]["name"] == "NameError"
    assert (await session.get())["executions"] == 2, "one log for both sandboxes"
    assert (await session.post("close"))["state"] == "closed", "and again"
    await session.post("reopen")
    assert (await session.execute("open('kept.txt').read()"))["results"][0]["text"] == "'kept'"


async def test_no_snapshot_is_left_of_a_session_that_was_deleted(api: Api) -> None:
    session = await begin(api)
    await session.post("close")
    mine = [s for s in await snapshots(api) if s["metadata"].get("session") == session.id]
    assert len(mine) == 1
    await ok(api.http.delete(session.path))
    mine = [s for s in await snapshots(api) if s["metadata"].get("session") == session.id]
    assert mine == []


async def snapshots(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await ok(api.http.get("/v1/snapshots")))["snapshots"]
    return found


async def test_what_stays_of_a_deleted_session_and_what_purge_removes(api: Api) -> None:
    session = await begin(api)
    did = await session.execute("open('artifacts/a','w').write('secret'); print('secret')")
    gone = await ok(api.http.delete(session.path))
    assert gone == {"deleted": True, "session_id": session.id, "kept": ["log", "artifacts"]}
    url = did["artifacts"][0]["url"]
    assert (await api.http.get(url)).text == "secret"
    assert (await api.http.delete(session.path)).status_code == 410
    refused = await api.http.post("/api/e2b/execute", json={"session_id": session.id, "code": "1"})
    assert refused.status_code == 410
    assert (await api.http.post(f"{session.path}/reopen")).status_code == 410
    listed = (await ok(api.http.get("/api/sessions")))["sessions"]
    assert session.id not in [each["session_id"] for each in listed]
    purged = await ok(api.http.delete(session.path, params={"purge": "true"}))
    assert purged["kept"] == []
    assert (await api.http.get(url)).status_code == 404
    (logged,) = (await ok(api.http.get(f"{session.path}/executions")))["executions"]
    assert logged["stdout"] is None and logged["command"] is None
    assert logged["stdout_bytes"] == 7, "that it ran is still known"


async def test_an_unused_session_is_closed_with_its_files(api: Api) -> None:
    session = await begin(api, idle_timeout_ms=1000)
    await session.execute("open('f','w').write('1')")

    async def closed() -> bool:
        return bool((await session.get())["state"] == "closed")

    await eventually(closed, what="it is closed", within=10)
    about = await session.get()
    assert about["reason"] == "it was not used" and about["workspace"]["kept"] == "snapshot"
    await session.post("reopen")
    assert (await session.execute("open('f').read()"))["results"][0]["text"] == "'1'"
    await api.http.delete(session.path)


async def test_a_session_whose_sandbox_somebody_deleted_says_so(api: Api) -> None:
    session = await begin(api)
    await api.http.delete(f"/v1/sandboxes/{session.started['sandbox_id']}")
    about = await session.get()
    assert about["state"] == "closed" and "deleted" in about["reason"]
    assert about["workspace"]["kept"] == "none" and "files" in about["workspace"]["not_kept"]
    assert (await session.post("reopen"))["state"] == "open", "empty, but usable"
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
    refused = await api.http.post(
        f"{session.path}/tools/run_command", json={"arguments": {"command": "id"}}
    )
    assert refused.status_code == 403 and "count_words" in refused.json()["error"]["hint"]
    await api.http.delete(session.path)


async def test_arguments_are_data_and_never_words_of_a_command(session: Session) -> None:
    hostile = "'; touch /workspace/pwned; $(touch /workspace/pwned) `touch pwned` #"
    did = await session.tool("checksum", text=hostile)
    assert did["stdout"].split()[0] == hashlib.sha256(hostile.encode()).hexdigest()
    written = await session.tool("write_file", path=f"{hostile[:8]}/f", content=hostile)
    assert written["status"] == "ok"
    read = await session.tool("read_file", path=f"{hostile[:8]}/f")
    assert read["stdout"] == hostile
    listed = (await session.tool("list_files"))["stdout"].splitlines()
    assert f"/workspace/{hostile[:8]}/f" in listed and "/workspace/pwned" not in listed
    quoted = await session.tool("run_command", command=f"printf %s {shlex.quote(hostile)}")
    assert quoted["stdout"] == hostile


@pytest.mark.parametrize(
    ("name", "arguments", "field"),
    [
        ("count_words", {}, "arguments"),
        ("count_words", {"text": 3}, "arguments.text"),
        ("count_words", {"text": "a", "more": 1}, "arguments"),
        ("run_python", {"code": ""}, "arguments.code"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused(
    session: Session, name: str, arguments: dict[str, Any], field: str
) -> None:
    answer = await session.http.post(f"{session.path}/tools/{name}", json={"arguments": arguments})
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["field"] == field
    assert (await session.get())["executions"] == 0


async def test_a_tool_that_runs_code_shares_the_interpreter(session: Session) -> None:
    await session.execute("y = 5")
    assert (await session.tool("run_python", code="y * 2"))["results"][0]["text"] == "10"


async def test_the_registry_can_be_read(api: Api) -> None:
    everything = await ok(api.http.get("/api/registry"))
    assert list(everything) == ["environments", "agents", "tools", "prompts", "problems"]
    assert everything["problems"] == []
    assert {"python", "node"} <= {each["name"] for each in everything["environments"]}
    agent = await ok(api.http.get("/api/registry/agents/code_executor"))
    assert agent["environment"] == "python" and "run_python" in agent["tools"]
    one = await ok(api.http.get("/api/registry/environments/Python3"))
    assert one["name"] == "python"
    tool = await ok(api.http.get("/api/registry/tools/run_python", params={"format": "openai"}))
    assert tool["type"] == "function" and tool["function"]["parameters"]["required"] == ["code"]
    prompt = await ok(api.http.get("/api/registry/prompts/code_executor"))
    assert "run_python" in prompt["text"]
    assert (await api.http.get("/api/registry/tools/none")).status_code == 404
    assert (await api.http.get("/api/registry/nothing")).status_code == 400
    assert (await api.http.put("/api/registry/tools/x", json={})).status_code == 405


OF_SEEDS = ["/api/sessions", "/api/e2b/execute", "/api/e2b/files", "/create_session", "/execute"]
OF_SEEDS += ["/cleanup", "/api/playground/container", "/api/playground/sync"]
OF_SEEDS += ["/api/playground/install", "/api/playground/execute"]


@pytest.mark.parametrize("path", OF_SEEDS)
async def test_what_curl_calls_a_form_is_taken_from_curl_alone(api: Api, path: str) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (
        {**form, "user-agent": "Mozilla/5.0"},
        {**form, "referer": "http://evil.example/"},
        {"content-type": "text/plain"},
    ):
        answer = await api.http.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 415, headers
    evil = {**form, "origin": "http://evil.example"}
    assert (await api.http.post(path, content=b"{}", headers=evil)).status_code == 403
    taken = await api.http.post(path, content=b'{"x": 1}', headers=form)
    assert taken.status_code == 400 and "x" in taken.json()["error"]["message"], taken.text


async def test_all_else_takes_json_alone(api: Api) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    strict = await api.http.post("/v1/sandboxes", content=b"{}", headers=form)
    assert strict.status_code == 415


@pytest.mark.parametrize(
    "body",
    [
        {"session_id": "nope", "code": "1"},
        {"session_id": "../x", "code": "1"},
    ],
)
async def test_an_unknown_session_is_not_found(api: Api, body: dict[str, Any]) -> None:
    answer = await api.http.post("/api/e2b/execute", json=body)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


async def test_a_list_can_be_read_in_parts(api: Api, session: Session) -> None:
    other = await begin(api, metadata={"team": "blue"})
    after = {"after": session.id, "limit": 1}
    (found,) = (await ok(api.http.get("/api/sessions", params=after)))["sessions"]
    assert found["session_id"] == other.id and found["metadata"] == {"team": "blue"}
    await api.http.delete(other.path)
    closed = await ok(api.http.get("/api/sessions", params={"state": "closed"}))
    assert other.id not in [each["session_id"] for each in closed["sessions"]]
    assert (await api.http.get("/api/sessions", params={"state": "no"})).status_code == 400
    assert (await api.http.get("/api/sessions", params={"after": "no"})).status_code == 404
