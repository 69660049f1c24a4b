"""The playground's API: shapes, syncs of an editor's tree, and errors."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support import eventually
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

ROOT = "/api/playground"
CONTAINER = f"{ROOT}/container"


class Session:
    def __init__(self, http: httpx.AsyncClient, id: str) -> None:
        self.http = http
        self.id = id

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"{ROOT}/{path}", json={"sessionId": self.id, **body})

    async def done(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def sync(self, *files: dict[str, Any], **more: Any) -> dict[str, Any]:
        return await self.done("sync", files=list(files), **more)

    async def sh(self, script: str) -> str:
        return str((await self.done("execute", code=script, filename=".probe.sh"))["output"])

    async def tree(self) -> list[str]:
        return (await self.sh("find . -mindepth 1 -not -name .probe.sh | sort")).split()


@pytest.fixture
async def http(server: RealServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=20) as made:
        yield made


@pytest.fixture
async def session(http: httpx.AsyncClient) -> AsyncIterator[Session]:
    made = Session(http, f"session-{uuid4()}")
    await made.done("container", template="bash")
    yield made
    await http.delete(CONTAINER, params={"sessionId": made.id})


@pytest.fixture
async def node(http: httpx.AsyncClient) -> AsyncIterator[Session]:
    made = Session(http, f"node-{uuid4()}")
    await made.done("container")
    yield made
    await http.delete(CONTAINER, params={"sessionId": made.id})


def file(name: str, content: str | None = "", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "file", "content": content, **more}


def folder(name: str, *children: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "folder", "children": list(children), **more}


def refused(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    return f"{error['message']}; {error.get('hint', '')}"


@pytest.mark.needs("node")
async def test_the_answers_have_the_documented_fields(http: httpx.AsyncClient) -> None:
    session = Session(http, "unique-session-id")
    made = await session.done("container")
    container = made["containerId"]
    assert made == {
        "success": True,
        "containerId": container,
        "message": "container created",
        "existing": False,
        "timeout": 1_800_000,
    }
    box = (await http.get(f"/v1/sandboxes/{container}")).json()
    assert (box["template"], box["idle_timeout_ms"]) == ("node", 1_800_000)
    assert (box["limits"]["memory"], box["limits"]["cpus"]) == (512 * 1024 * 1024, 0.5)
    status = (await http.get(CONTAINER, params={"sessionId": session.id})).json()
    assert status.pop("createdAt").endswith("Z")
    assert status == {
        "exists": True,
        "sessionId": session.id,
        "containerId": container,
        "status": "running",
        "timeout": 1_800_000,
    }
    answer = await session.post("install", packages=["fastify", "@fastify/cors"])
    said = refused(answer, 403, "forbidden")
    assert "'fastify' must be fetched" in said and "setting `network` is none" in said
    assert await session.sync(file("index.js", "1")) == {
        "success": True,
        "message": "1 written, 0 deleted",
        "written": ["index.js"],
        "deleted": [],
        "unchanged": 0,
    }
    assert await session.done("execute", code="console.log('Hello');", filename="index.js") == {
        "success": True,
        "output": "Hello\n",
        "error": "",
        "exitCode": 0,
        "timedOut": False,
    }
    gone = await http.delete(CONTAINER, params={"sessionId": session.id})
    assert gone.json() == {"success": True, "message": "container removed"}
    after = await http.get(CONTAINER, params={"sessionId": session.id})
    assert "POST /api/playground/container" in refused(after, 404, "not_found")


async def test_one_container_per_session_id_also_when_asked_ten_times_at_once(
    http: httpx.AsyncClient,
) -> None:
    session = Session(http, f"many-{uuid4()}")
    made = await asyncio.gather(*(session.done("container", template="bash") for _ in range(10)))
    first = made[0]["containerId"]
    assert {each["containerId"] for each in made} == {first}
    assert sorted(each["existing"] for each in made) == [False] + [True] * 9
    await http.delete(f"/v1/sandboxes/{first}")
    second = await session.done("container", template="bash")
    assert second["containerId"] != first and not second["existing"], "one that died is replaced"
    assert (await http.delete(CONTAINER, params={"sessionId": session.id})).status_code == 200


async def test_only_changes_are_written(session: Session) -> None:
    tree = [folder("src", file("a.js", "1"), file("b.js", "2")), file("package.json", "{}")]
    assert (await session.sync(*tree))["written"] == ["src/a.js", "src/b.js", "package.json"]
    again = await session.sync(*tree)
    assert (again["written"], again["deleted"], again["unchanged"]) == ([], [], 3)
    tree[0] = folder("src", file("a.js", "1"), file("b.js", "3", language="javascript"))
    changed = await session.sync(*tree)
    assert (changed["written"], changed["unchanged"]) == (["src/b.js"], 2)
    await session.sh("printf X > src/a.js; rm package.json")  # as long as before
    assert sorted((await session.sync(*tree))["written"]) == ["package.json", "src/a.js"]
    assert await session.sh("cat src/a.js src/b.js") == "13"
    assert (await session.sync(file("src", "file")))["written"] == ["src"]
    assert (await session.sync(folder("src", file("b", "2"))))["written"] == ["src/b"]


async def test_files_missing_in_the_tree_are_removed_and_nothing_else(session: Session) -> None:
    await session.sync(folder("old", folder("deep", file("x", "1"))), file("keep", "2"))
    await session.sh("mkdir -p node_modules/m; touch node_modules/m/i made")
    done = await session.sync(file("keep", "2"))
    assert sorted(done["deleted"]) == ["old", "old/deep", "old/deep/x"]
    expected = ["./keep", "./made", "./node_modules", "./node_modules/m", "./node_modules/m/i"]
    assert await session.tree() == expected


async def test_a_partial_sync_removes_only_what_it_names(session: Session) -> None:
    await session.sync(file("a", "1"), file("b", "2"), folder("d", file("x", "3")))
    gone = [file("b", None, deleted=True), folder("d", deleted=True)]
    done = await session.sync(file("a", "4"), *gone, file("nope", None, deleted=True), partial=True)
    assert (done["written"], done["deleted"]) == (["a"], ["b", "d"])
    assert await session.tree() == ["./a"]
    done = await session.sync(file("a", None), file("c", "3"))  # without content: as it is
    assert (done["written"], done["deleted"]) == (["c"], [])
    answer = await session.post("sync", files=[file("never", None)])
    assert "came without content" in refused(answer, 409, "conflict")


async def test_binary_files_and_names_in_any_script(session: Session) -> None:
    data = bytes(range(256))
    coded = base64.b64encode(data).decode()
    tree = [folder("grüße", file("图.png", coded, encoding="base64")), file("e", "")]
    await session.sync(*tree)
    container = (await session.done("container"))["containerId"]
    url = f"/v1/sandboxes/{container}/files?path=grüße/图.png"
    assert (await session.http.get(url)).content == data
    assert (await session.sync(*tree))["unchanged"] == 2


DEEP = file("x")
for _ in range(70):
    DEEP = folder("d", DEEP)
LARGE = {
    "many": [file(f"f{n}") for n in range(10_001)],
    "deep": [DEEP],
    # A look at all folders above each of these files takes minutes.
    "a deep name": [folder("/".join("d" * 1900), *(file(f"f{n}") for n in range(9000)))],
    "large": [file("large", "x" * (17 * 1024 * 1024))],
}


@pytest.mark.parametrize("files", LARGE.values(), ids=LARGE)
async def test_trees_that_are_too_large_are_refused(session: Session, files: Any) -> None:
    refused(await session.post("sync", files=files), 413, "too_large")
    assert await session.tree() == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([folder("a", file("../../x"))], "'..' component"),
        ([folder("a", file("/b"))], "is absolute"),
        ([file(".")], "no file's name"),
        ([file("a\0b")], "no file's name"),
        ([file("n" * 256)], "255 bytes"),
        ([folder("d" * 200, folder("e" * 200, file("/".join(["f" * 200] * 20))))], "4000 bytes"),
        ([file("a"), file("./a")], "is there twice"),
        ([file("a"), file("a/b")], "is no folder"),
        ([file("a", "YQ", encoding="base64")], "not valid base64"),
        ([{"name": "a"}], "files[0].type: missing"),
        ([{"name": "a", "type": "link"}], "invalid enum value"),
        ({"name": "a"}, "files: "),
    ],
)
async def test_a_wrong_tree_is_refused(session: Session, files: Any, problem: str) -> None:
    answer = await session.post("sync", files=files)
    assert problem in refused(answer, 400, "invalid")
    assert await session.tree() == []


@pytest.mark.parametrize(
    "spoil", ["echo nonsense > $N", "rm $N; ln -s /workspace/victim $N", "rm $N; mkfifo $N"]
)
async def test_a_program_that_spoils_the_note_harms_only_itself(
    session: Session, spoil: str
) -> None:
    await session.sync(file("a", "1"), file("victim", "v"))
    await session.sh(f"N=/tmp/.capsule-sync.json; test -f $N && {{ {spoil}; }}")
    assert (await session.sync(file("a", "2"), file("victim", "v")))["written"][0] == "a"
    assert await session.sh("cat a victim") == "2v"


async def test_syncs_at_once_are_done_one_after_the_other(session: Session) -> None:
    trees = [[file(f"f{i}", str(n)) for i in range(5)] + [file(f"only{n}", "")] for n in range(6)]
    await asyncio.gather(*(session.sync(*tree) for tree in trees))
    content = await session.sh("cat f0 f1 f2 f3 f4; ls only*")
    assert content == content[0] * 5 + f"only{content[0]}\n"
    files = [file(f"f{i}", "x" * 1000) for i in range(100)]
    answers = await asyncio.gather(*(session.post("sync", files=files) for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200, 429}
    late = next(answer for answer in answers if answer.status_code == 429)
    assert int(late.headers["retry-after"]) >= 1


async def test_links_and_folders_of_a_program_are_conflicts(session: Session) -> None:
    await session.sync(folder("src", file("a", "1")), file("b", "2"))
    await session.sh("mv src real; ln -s real src; ln -sf /etc/hostname b; mkdir c")
    for node, problem in (
        (folder("src", file("a", "new")), "'src' is a symbolic link"),
        (file("b", "new"), "'b' is a symbolic link"),
        (file("c", "1"), "is a dir in the container"),
    ):
        answer = await session.post("sync", files=[node])
        assert problem in refused(answer, 409, "conflict")
    # What was removed in the editor: the link itself goes, its target stays.
    done = await session.sync(file("e", "3"))
    assert "b" in done["deleted"] and "src/a" not in done["deleted"]
    assert await session.sh("cat real/a") == "1"


async def test_a_wrong_file_or_package_is_refused(session: Session) -> None:
    for package in ("", "-g", "a b", "a;reboot", "./../x", "file:/etc", "http://x/y.tgz", "$(id)"):
        refused(await session.post("install", packages=[package]), 400, "invalid")
    for name in ("../a.js", "/workspace/a.js", "a\0.js", "", "a.rs"):
        refused(await session.post("execute", code="x", filename=name), 400, "invalid")
    await session.sh("ln -s /etc/hostname link.sh")
    refused(await session.post("execute", code="x", filename="link.sh"), 403, "forbidden")


@pytest.mark.needs("node")
async def test_code_runs_in_the_folder_of_its_file(node: Session) -> None:
    await node.sync(folder("src", file("lib.js", "exports.six = 6")))
    code = "console.log(require('./lib').six * 7); console.error('e'); process.exit(3)"
    ran = await node.done("execute", code=code, filename="src/main.js")
    ended = {"success": False, "exitCode": 3, "timedOut": False}
    assert ran == {"output": "42\n", "error": "e\n", **ended}
    ran = await node.done("execute", code="while (true) {}", timeout_ms=300)
    assert (ran["success"], ran["timedOut"]) == (False, True)


@pytest.mark.needs("npm")
@pytest.mark.timeout(60)
async def test_a_package_of_the_workspace_is_really_installed(node: Session) -> None:
    package = file("package.json", '{"name": "greet", "version": "1.0.0", "main": "i.js"}')
    await node.sync(folder("greet", package, file("i.js", "module.exports = () => 'hi'")))
    done = await node.done("install", packages=["./greet"])
    assert done["success"], done
    ran = await node.done("execute", code="console.log(require('greet')())")
    assert ran["output"] == "hi\n"


async def test_sessions_without_a_container_are_not_found(http: httpx.AsyncClient) -> None:
    nobody = Session(http, "nobody")
    bodies: dict[str, Any] = {"sync": {"files": []}, "install": {"packages": ["a"]}}
    for path, body in {**bodies, "execute": {"code": ""}}.items():
        refused(await nobody.post(path, **body), 404, "not_found")
    for method in ("GET", "DELETE"):
        answer = await http.request(method, CONTAINER, params={"sessionId": "nobody"})
        refused(answer, 404, "not_found")
        refused(await http.request(method, CONTAINER), 400, "invalid")
    for wrong in ({"sessionId": ""}, {"sessionId": "x" * 129}, {"sessionId": "a\0b"}, {}):
        refused(await http.post(CONTAINER, json=wrong), 400, "invalid")


async def test_an_unused_container_ends_and_a_used_one_does_not() -> None:
    with real_server(PLAYGROUND_IDLE_TIMEOUT="2") as server:
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=20) as http:
            used, unused = Session(http, "used"), Session(http, "unused")
            for session in (used, unused):
                assert (await session.done("container", template="bash"))["timeout"] == 2000

            async def gone() -> bool:
                await used.sync(file("a", "1"))
                params = {"sessionId": "unused"}
                return (await http.get(CONTAINER, params=params)).status_code == 404

            await eventually(gone, what="the unused one ends", within=15)
            assert (await used.done("container"))["existing"]
