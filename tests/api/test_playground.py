"""The playground's API: the seed's requests field by field, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.api.double import serving
from tests.support import eventually
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

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


@needs_node
async def test_the_requests_of_the_seed(http: httpx.AsyncClient) -> None:
    made = await http.post(CONTAINER, json={"sessionId": "unique-session-id"})
    assert made.status_code == 200
    container = made.json()["containerId"]
    assert made.json() == {
        "success": True,
        "containerId": container,
        "message": "container created",
        "existing": False,
        "timeout": 1_800_000,
    }
    status = (await http.get(CONTAINER, params={"sessionId": "unique-session-id"})).json()
    assert status.pop("createdAt").endswith("Z")
    assert status == {
        "exists": True,
        "sessionId": "unique-session-id",
        "containerId": container,
        "status": "running",
        "timeout": 1_800_000,
    }
    packages = {"sessionId": "unique-session-id", "packages": ["fastify", "@fastify/cors"]}
    said = refused(await http.post(f"{ROOT}/install", json=packages), 403, "forbidden")
    assert "'fastify' must be fetched" in said and "setting `network` is none" in said
    files = {"sessionId": "unique-session-id", "files": [file("index.js", "1")]}
    assert (await http.post(f"{ROOT}/sync", json=files)).json() == {
        "success": True,
        "message": "1 written, 0 deleted",
        "written": ["index.js"],
        "deleted": [],
        "unchanged": 0,
    }
    code = {
        "sessionId": "unique-session-id",
        "code": "console.log('Hello');",
        "filename": "index.js",
    }
    assert (await http.post(f"{ROOT}/execute", json=code)).json() == {
        "success": True,
        "output": "Hello\n",
        "error": "",
        "exitCode": 0,
        "timedOut": False,
    }
    gone = await http.delete(f"{CONTAINER}?sessionId=unique-session-id")
    assert gone.json() == {"success": True, "message": "container removed"}
    after = await http.get(CONTAINER, params={"sessionId": "unique-session-id"})
    assert "POST /api/playground/container" in refused(after, 404, "not_found")


@needs_node
async def test_a_container_has_the_limits_of_the_seed(node: Session) -> None:
    container = (await node.done("container"))["containerId"]
    box = (await node.http.get(f"/v1/sandboxes/{container}")).json()
    assert box["template"] == "node"
    assert box["limits"]["memory"] == 512 * 1024 * 1024
    assert box["limits"]["cpus"] == 0.5
    assert box["idle_timeout_ms"] == 1_800_000
    code = "require('net').connect(80, '1.1.1.1').on('error', e => console.log(e.code))"
    assert "ENETUNREACH" in (await node.done("execute", code=code))["output"]


async def test_one_container_per_session_id_also_when_asked_ten_times_at_once(
    http: httpx.AsyncClient,
) -> None:
    session = Session(http, f"many-{uuid4()}")
    made = await asyncio.gather(*(session.done("container", template="bash") for _ in range(10)))
    assert len({each["containerId"] for each in made}) == 1
    assert sorted(each["existing"] for each in made) == [False] + [True] * 9
    other = await Session(http, session.id + "x").done("container", template="bash")
    assert other["containerId"] != made[0]["containerId"]
    for id in (session.id, session.id + "x"):
        assert (await http.delete(CONTAINER, params={"sessionId": id})).status_code == 200


async def test_only_what_changed_is_written(session: Session) -> None:
    tree = [folder("src", file("a.js", "1"), file("b.js", "2")), file("package.json", "{}")]
    assert (await session.sync(*tree))["written"] == ["src/a.js", "src/b.js", "package.json"]
    again = await session.sync(*tree)
    assert (again["written"], again["deleted"], again["unchanged"]) == ([], [], 3)
    tree[0] = folder("src", file("a.js", "1"), file("b.js", "3", language="javascript"))
    changed = await session.sync(*tree)
    assert (changed["written"], changed["unchanged"]) == (["src/b.js"], 2)
    assert await session.sh("cat src/a.js src/b.js") == "13"


async def test_what_a_program_changed_is_written_again(session: Session) -> None:
    await session.sync(file("a", "editor"))
    await session.sh("printf change > a")  # as long as before
    assert (await session.sync(file("a", "editor")))["written"] == ["a"]
    assert await session.sh("cat a") == "editor"
    await session.sh("rm a")
    assert (await session.sync(file("a", "editor")))["written"] == ["a"]


async def test_what_is_gone_from_the_tree_is_removed_and_nothing_else(session: Session) -> None:
    await session.sync(
        folder("old", folder("deep", file("x", "1"))), file("keep", "2"), folder("e")
    )
    await session.sh(
        "mkdir -p node_modules/m; touch node_modules/m/i made; mkdir -p e; touch e/made"
    )
    done = await session.sync(file("keep", "2"))
    assert sorted(done["deleted"]) == ["old", "old/deep", "old/deep/x"]
    assert await session.tree() == [
        "./e", "./e/made", "./keep", "./made", "./node_modules", "./node_modules/m",
        "./node_modules/m/i",
    ]  # fmt: skip


async def test_a_file_becomes_a_folder_and_back(session: Session) -> None:
    await session.sync(file("a", "1"))
    assert (await session.sync(folder("a", file("b", "2"))))["written"] == ["a/b"]
    assert (await session.sync(file("a", "3")))["written"] == ["a"]
    assert await session.sh("cat a") == "3"


async def test_a_partial_sync_removes_only_what_it_names(session: Session) -> None:
    await session.sync(file("a", "1"), file("b", "2"), folder("d", file("x", "3")))
    gone = [file("b", None, deleted=True), folder("d", deleted=True)]
    done = await session.sync(file("a", "4"), *gone, file("nope", None, deleted=True), partial=True)
    assert (done["written"], done["deleted"]) == (["a"], ["b", "d"])
    assert await session.tree() == ["./a"]
    assert (await session.sync())["deleted"] == ["a"]


async def test_a_file_without_content_stays_as_it_is(session: Session) -> None:
    await session.sync(file("a", "1"), file("b", "2"))
    done = await session.sync(file("a", None), file("b", "3"))
    assert (done["written"], done["deleted"]) == (["b"], [])
    assert (await session.sync(file("b", "3")))["deleted"] == ["a"]
    answer = await session.post("sync", files=[file("never", None)])
    assert "came without content" in refused(answer, 409, "conflict")


async def test_binary_files_and_names_in_any_script(session: Session) -> None:
    data = bytes(range(256))
    coded = base64.b64encode(data).decode()
    await session.sync(folder("grüße", file("图.png", coded, encoding="base64")), file("e", ""))
    container = (await session.done("container"))["containerId"]
    url = f"/v1/sandboxes/{container}/files?path=grüße/图.png"
    assert (await session.http.get(url)).content == data
    assert (
        await session.sync(folder("grüße", file("图.png", coded, encoding="base64")), file("e"))
    )["unchanged"] == 2


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([file("../x")], "'..' component"),
        ([folder("..", file("x"))], "'..' component"),
        ([folder("a", file("../../x"))], "'..' component"),
        ([file("/etc/passwd")], "is absolute"),
        ([folder("a", file("/b"))], "is absolute"),
        ([file("")], "no file's name"),
        ([file(".")], "no file's name"),
        ([file("a\0b")], "no file's name"),
        ([file("n" * 256)], "255 bytes"),
        ([folder("d" * 200, folder("e" * 200, file("/".join(["f" * 200] * 20))))], "4000 bytes"),
        ([file("a"), file("a")], "is there twice"),
        ([file("a"), file("./a")], "is there twice"),
        ([file("a"), file("a/b")], "is no folder"),
        ([file("a/b"), file("a")], "is there twice"),
        ([file("a", "!", encoding="base64")], "not valid base64"),
        ([file("a", "YQ", encoding="base64")], "not valid base64"),
        ([{"name": "a"}], "files[0].type: missing"),
        ([{"name": "a", "type": "link"}], "invalid enum value"),
        ([{"name": "a", "type": "file", "content": 3}], "files[0].content"),
        ({"name": "a"}, "files: "),
    ],
)
async def test_trees_that_make_no_sense(session: Session, files: Any, problem: str) -> None:
    answer = await session.post("sync", files=files)
    assert problem in refused(answer, 400, "invalid")
    assert await session.tree() == []


async def test_trees_that_are_too_large(session: Session) -> None:
    many = [file(f"f{n}") for n in range(10_001)]
    refused(await session.post("sync", files=many), 413, "too_large")
    deep = folder("d")
    for _ in range(70):
        deep = folder("d", deep)
    refused(await session.post("sync", files=[deep]), 413, "too_large")
    # Neither in one name: to look at what leads to each of these files took minutes.
    deep = folder("/".join("d" * 1900), *(file(f"f{n}") for n in range(9000)))
    refused(await session.post("sync", files=[deep]), 413, "too_large")
    large = file("large", "x" * (17 * 1024 * 1024))
    assert "PUT /v1/sandboxes" in refused(
        await session.post("sync", files=[large]), 413, "too_large"
    )
    nested = '{"name":"d","type":"folder","children":[' * 100_000
    answer = await session.http.post(
        f"{ROOT}/sync",
        content=f'{{"sessionId":"{session.id}","files":[{nested}',
        headers={"content-type": "application/json"},
    )
    refused(answer, 400, "invalid")
    assert await session.tree() == []


async def test_links_that_a_program_planted_are_conflicts(session: Session) -> None:
    await session.sync(folder("src", file("a", "1")), file("b", "2"))
    await session.sh("mv src real; ln -s real src; ln -sf /etc/hostname b")
    before = await session.sh("cat real/a")
    answer = await session.post("sync", files=[folder("src", file("a", "new"))])
    assert "'src' is a symbolic link" in refused(answer, 409, "conflict")
    answer = await session.post("sync", files=[file("b", "new")])
    assert "'b' is a symbolic link" in refused(answer, 409, "conflict")
    assert await session.sh("cat real/a") == before == "1"
    # What was removed in the editor: the link itself goes, what it leads to stays.
    done = await session.sync(file("c", "3"))
    assert "b" in done["deleted"] and "src/a" not in done["deleted"]
    assert await session.sh("cat real/a") == "1"
    await session.sync(file("src", None, deleted=True), partial=True)
    assert "./src" not in await session.tree()


async def test_a_folder_in_the_place_of_a_file_is_a_conflict(session: Session) -> None:
    await session.sh("mkdir a; touch a/made b")
    for node, kind in ((file("a", "1"), "dir"), (folder("b", file("c", "1")), "file")):
        answer = await session.post("sync", files=[node])
        assert f"is a {kind} in the container" in refused(answer, 409, "conflict")
    assert await session.tree() == ["./a", "./a/made", "./b"]


@pytest.mark.parametrize(
    "spoil",
    [
        "echo nonsense > $N",
        "rm $N; ln -s /workspace/victim $N",
        "rm $N; mkdir $N",
        "rm $N; mkfifo $N",
        'echo \'{"files":{"../../x":{"hash":"","size":0,"mtime":0},"/etc/passwd":'
        '{"hash":"","size":0,"mtime":0}},"folders":["..",""]}\' > $N',
        "rm $N; head -c 9000000 /dev/zero > $N",
        "chmod 0 $N",
        # Its depth is the program's own affair; a server that took it apart ran out of memory.
        """D=$(head -c 30000 /dev/zero | tr '\\0' d | sed 's,d,d/,g')
        printf '{"files":{"%sd":{"hash":"","size":0,"mtime":0}},"folders":["%sd"]}' $D $D > $N""",
    ],
)
async def test_a_program_that_spoils_our_note_harms_only_itself(
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
    n = content[0]
    assert content == n * 5 + f"only{n}\n"


async def test_too_many_at_once_are_told_to_wait(session: Session) -> None:
    files = [file(f"f{i}", "x" * 1000) for i in range(100)]
    answers = await asyncio.gather(*(session.post("sync", files=files) for _ in range(40)))
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 429}
    late = next(answer for answer in answers if answer.status_code == 429)
    assert int(late.headers["retry-after"]) >= 1


@needs_node
async def test_code_runs_where_the_editor_has_it(node: Session) -> None:
    await node.sync(folder("src", file("lib.js", "exports.six = 6")))
    ran = await node.done(
        "execute", code="console.log(require('./lib').six * 7)", filename="src/main.js"
    )
    assert (ran["output"], ran["success"]) == ("42\n", True)
    assert await node.sh("ls src") == "lib.js\nmain.js\n"


@needs_node
async def test_what_code_did_is_data(node: Session) -> None:
    ran = await node.done("execute", code="console.error('e'); process.exit(3)")
    assert ran == {"success": False, "output": "", "error": "e\n", "exitCode": 3, "timedOut": False}
    ran = await node.done("execute", code="while (true) {}", timeout_ms=300)
    assert (ran["success"], ran["timedOut"]) == (False, True)


async def test_what_cannot_be_run(session: Session) -> None:
    answer = await session.post("execute", code="x", filename="a.rs")
    assert "it can run: " in refused(answer, 400, "invalid")
    for name in ("../a.js", "/workspace/a.js", "a\0.js", ""):
        refused(await session.post("execute", code="x", filename=name), 400, "invalid")
    await session.sh("ln -s /etc/hostname link.sh")
    refused(await session.post("execute", code="x", filename="link.sh"), 403, "forbidden")


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.timeout(60)
@needs_node
async def test_a_package_of_the_workspace_is_really_installed(node: Session) -> None:
    package = '{"name": "greet", "version": "1.0.0", "main": "i.js"}'
    await node.sync(
        folder("greet", file("package.json", package), file("i.js", "module.exports = () => 'hi'"))
    )
    done = await node.done("install", packages=["./greet"])
    assert done["success"], done
    ran = await node.done("execute", code="console.log(require('greet')())")
    assert ran["output"] == "hi\n"


@pytest.mark.parametrize(
    "name",
    ["", "-g", "--registry=http://x", "a b", "a;reboot", "../x", "./../x", "file:/etc", "/etc",
     "http://x/y.tgz", "git+ssh://x", "$(id)", "a@1 b"],
)  # fmt: skip
async def test_what_is_no_package(session: Session, name: str) -> None:
    refused(await session.post("install", packages=[name]), 400, "invalid")


async def test_sessions_that_have_no_container(http: httpx.AsyncClient) -> None:
    nobody = Session(http, "nobody")
    for path, body in (
        ("sync", {"files": []}),
        ("install", {"packages": ["a"]}),
        ("execute", {"code": ""}),
    ):
        refused(await nobody.post(path, **body), 404, "not_found")
    for method in ("GET", "DELETE"):
        answer = await http.request(method, CONTAINER, params={"sessionId": "nobody"})
        refused(answer, 404, "not_found")
        refused(await http.request(method, CONTAINER), 400, "invalid")
    for wrong in ("", "x" * 129, "a\0b"):
        refused(await http.post(CONTAINER, json={"sessionId": wrong}), 400, "invalid")
    refused(await http.post(CONTAINER, json={}), 400, "invalid")


async def test_a_container_that_died_is_replaced(session: Session) -> None:
    first = (await session.done("container"))["containerId"]
    await session.http.delete(f"/v1/sandboxes/{first}")
    second = await session.done("container", template="bash")
    assert second["containerId"] != first and not second["existing"]


async def test_a_time_without_use_ends_it_and_use_does_not(agent_binary: object) -> None:
    # Thirty minutes are the default, which the seed's requests show.
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


async def test_an_address_that_asks_too_often_is_told_when_to_come_back() -> None:
    async with serving(rate_limit_address="3/minute") as running:
        async with httpx.AsyncClient(verify=False, base_url=running.url) as http:
            answers = [await http.get(CONTAINER) for _ in range(4)]  # without a session: a 400
            assert [answer.status_code for answer in answers] == [400, 400, 400, 429]
            assert [a.headers["ratelimit-remaining"] for a in answers] == ["2", "1", "0", "0"]
            refused(answers[3], 429, "capacity")
            assert 0 < int(answers[3].headers["retry-after"]) <= 60


async def test_a_sync_that_fills_the_disk_is_remembered_as_far_as_it_came(
    session: Session,
) -> None:
    free = int(await session.sh("echo $(($(stat -fc '%a*%S' .)))"))
    if free > 2 * 1024**3:
        pytest.skip("the size of a sandbox's disk is not enforced here")
    await session.sh(f"fallocate -l {free - 10_000_000} full")
    files = [file("a", "x" * 1000), file("b", "y" * 14_000_000), file("c", "z")]
    assert "b" in refused(await session.post("sync", files=files), 507, "no_space")
    await session.sh("rm full")
    assert (await session.sync())["deleted"] == ["a"]
