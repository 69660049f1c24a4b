"""Files as they are on the wire."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import quote

import httpx
import pytest

from capsule.edge.e2b.access import Access
from tests.api.client import Api
from tests.e2b.wire import Wire
from tests.support import eventually

pytestmark = pytest.mark.real

FILES = "/filesystem.Filesystem/"


async def put(wire: Wire, path: str, data: bytes, **headers: str) -> httpx.Response:
    return await wire.http.post(
        "/files",
        params={"path": path},
        content=data,
        headers={**wire.headers, "content-type": "application/octet-stream", **headers},
    )


async def get(wire: Wire, path: str, **headers: str) -> httpx.Response:
    return await wire.http.get("/files", params={"path": path}, headers={**wire.headers, **headers})


async def test_a_file_is_written_and_read(wire: Wire) -> None:
    written = await put(wire, "a/b.txt", b"hello")
    assert written.json() == [{"path": "/workspace/a/b.txt", "name": "b.txt", "type": "file"}]
    read = await get(wire, "/workspace/a/b.txt")
    assert read.content == b"hello" and read.headers["content-length"] == "5"


async def test_an_empty_file_says_so(wire: Wire) -> None:
    await put(wire, "empty", b"")
    read = await get(wire, "empty")
    assert (read.status_code, read.content) == (200, b"")
    assert read.headers["content-length"] == "0"


async def test_a_head_has_no_content(wire: Wire) -> None:
    await put(wire, "x", b"123")
    there = await wire.http.head("/files", params={"path": "x"}, headers=wire.headers)
    assert (there.status_code, there.headers["content-length"]) == (200, "3")
    gone = await wire.http.head("/files", params={"path": "y"}, headers=wire.headers)
    assert gone.status_code == 404


async def test_a_part_of_a_file_can_be_asked_for(wire: Wire) -> None:
    await put(wire, "part", b"0123456789")
    read = await get(wire, "part", range="bytes=2-4")
    assert (read.status_code, read.content) == (206, b"234")


async def test_a_form_has_files_with_paths_as_they_are(wire: Wire) -> None:
    written = await wire.http.post(
        "/files",
        files=[("file", ("/workspace/f/m2 é.txt", b"one")), ("file", ("deep/er/x", b"two"))],
        headers=wire.headers,
    )
    assert [each["path"] for each in written.json()] == [
        "/workspace/f/m2 é.txt",
        "/workspace/deep/er/x",
    ]
    assert (await get(wire, "f/m2 é.txt")).content == b"one"


async def test_the_path_in_the_query_wins_over_the_name(wire: Wire) -> None:
    written = await wire.http.post(
        "/files?path=right", files={"file": ("wrong", b"x")}, headers=wire.headers
    )
    assert written.json()[0]["path"] == "/workspace/right"


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("nothing", 404, "path '/workspace/nothing' does not exist"),
        ("/workspace", 400, "directory"),
    ],
)
async def test_what_cannot_be_read_says_why(wire: Wire, path: str, status: int, text: str) -> None:
    read = await get(wire, path)
    assert read.status_code == status
    assert read.json()["code"] == status and text in read.json()["message"]


async def test_bodies_that_make_no_sense_are_refused(wire: Wire) -> None:
    for kind, body in (
        ("text/plain", b"x"),
        ("multipart/form-data; boundary=x", b"nonsense"),
        ("multipart/form-data; boundary=x", b"--x--\r\n"),
    ):
        answer = await wire.http.post(
            "/files", content=body, headers={**wire.headers, "content-type": kind}
        )
        assert answer.status_code in (400, 415) and answer.json()["code"] == answer.status_code


async def test_folders_are_made_listed_moved_and_removed(wire: Wire) -> None:
    await wire.ask(FILES + "MakeDir", path="d/e")
    again = await wire.call(FILES + "MakeDir", {"path": "d/e"})
    assert again.status_code == 409 and again.json()["code"] == "already_exists"
    await put(wire, "d/e/x", b"1")
    await put(wire, "d/a", b"22")
    names = [e["path"] for e in (await wire.ask(FILES + "ListDir", path="d", depth=2))["entries"]]
    assert names == ["/workspace/d/a", "/workspace/d/e", "/workspace/d/e/x"]
    shallow = (await wire.ask(FILES + "ListDir", path="d"))["entries"]
    assert [e["name"] for e in shallow] == ["a", "e"]
    moved = await wire.ask(FILES + "Move", source="d/a", destination="new/place/b")
    assert moved["entry"]["path"] == "/workspace/new/place/b"
    await wire.ask(FILES + "Remove", path="d")
    await wire.ask(FILES + "Remove", path="d")
    gone = await wire.call(FILES + "Stat", {"path": "d"})
    assert gone.status_code == 404 and gone.json()["code"] == "not_found"


async def test_a_folder_is_listed_whole_or_not_at_all(wire: Wire) -> None:
    await wire.run("mkdir -p /workspace/d/many && cd /workspace/d/many && seq 20000 | xargs touch")
    whole = await wire.ask(FILES + "ListDir", path="d/many", depth=1)
    assert len(whole["entries"]) == 20_000
    assert whole["entries"][0]["path"] == "/workspace/d/many/1"
    refused = await wire.call(FILES + "ListDir", {"path": "d", "depth": 1000})
    assert refused.status_code == 400 and refused.json()["code"] == "invalid_argument"
    said = "more than 20000 entries, limit 20000; list a smaller folder, or with a smaller depth"
    assert refused.json()["message"] == said


async def test_an_entry_is_told_as_go_would(wire: Wire) -> None:
    await put(wire, "x", b"123")
    told = (await wire.ask(FILES + "Stat", path="~/x"))["entry"]
    assert told["type"] == "FILE_TYPE_FILE" and told["size"] == "3" and told["mode"] == 0o644
    assert told["permissions"] == "-rw-r--r--" and told["owner"] == "capsule"
    await wire.run("ln -s x /workspace/link")
    link = (await wire.ask(FILES + "Stat", path="./a/../link"))["entry"]
    assert link["isSymlink"] and link["symlinkTarget"] == "/workspace/x"
    assert link["permissions"] == "Lrwxrwxrwx" and link["type"] == "FILE_TYPE_FILE"


async def test_a_file_is_no_folder(wire: Wire) -> None:
    await put(wire, "x", b"1")
    for call in ("ListDir", "MakeDir"):
        refused = await wire.call(FILES + call, {"path": "x"})
        assert refused.status_code == 400 and refused.json()["code"] == "invalid_argument"


def link(access: Access, id: str, path: str, operation: str, expires: int | None = None) -> str:
    """What the SDKs make of a path: no word of the sandbox in it."""
    raw = f"{path}:{operation}::{access.token(id)}" + (f":{expires}" if expires else "")
    digest = base64.b64encode(hashlib.sha256(raw.encode()).digest()).decode().rstrip("=")
    more = f"&signature_expiration={expires}" if expires else ""
    return f"/files?path={quote(path)}&signature={quote('v1_' + digest)}{more}"


async def test_a_signed_link_needs_nothing_else(wire: Wire, access: Access, box: str) -> None:
    http, later = wire.http, int(time.time()) + 60
    await put(wire, "s", b"secret")
    assert (await http.get(link(access, box, "s", "read"))).content == b"secret"
    assert (await http.get(link(access, box, "s", "read", later))).content == b"secret"
    up = await http.post(link(access, box, "up", "write", later), files={"file": ("n", b"new")})
    assert up.json()[0]["path"] == "/workspace/up"


async def test_a_link_is_good_for_what_was_signed_alone(
    wire: Wire, access: Access, box: str
) -> None:
    http, early = wire.http, int(time.time()) - 5
    await put(wire, "s", b"secret")
    wrong = await http.get(link(access, box, "other", "read").replace("other", "s"))
    assert (wrong.status_code, wrong.json()["message"]) == (401, "invalid signature")
    assert (await http.get(link(access, box, "s", "write"))).status_code == 401
    late = await http.get(link(access, box, "s", "read", early))
    assert (late.status_code, late.json()["message"]) == (401, "signature is already expired")
    del wire.headers["x-access-token"]
    bare = await get(wire, "s")
    assert bare.json() == {"code": 401, "message": "missing signature query parameter"}


async def test_what_is_said_about_the_sandbox_itself(wire: Wire) -> None:
    told = (await wire.http.get("/metrics", headers=wire.headers)).json()
    assert told["cpu_count"] >= 1 and told["mem_total"] >= (told["mem_used"] or 0) >= 0
    assert (await wire.http.get("/envs", headers=wire.headers)).json() == {}
    del wire.headers["x-access-token"]
    assert (await wire.http.get("/envs", headers=wire.headers)).status_code == 401


async def test_nobody_is_at_home_while_it_is_paused(wire: Wire, api: Api) -> None:
    await put(wire, "x", b"1")
    await api.rpc("pause", id=wire.id)
    for answer in (
        await get(wire, "x"),
        await wire.call(FILES + "Stat", {"path": "x"}),
        await wire.http.get("/health", headers=wire.headers),
    ):
        assert answer.status_code == 502 and "was not found" in answer.json()["message"]
    await api.rpc("resume", id=wire.id)
    assert (await get(wire, "x")).content == b"1"


async def cut(wire: Wire, path: str, begun: Callable[[], Awaitable[bool]]) -> None:
    """An upload whose client leaves in the middle: when it has begun, and more was sent than lies
    in any buffer."""
    sent = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        for _ in range(24):
            yield bytes(1_000_000)
        await eventually(begun, what="begun")
        sent.set()
        await asyncio.Event().wait()

    headers = {**wire.headers, "content-type": "application/octet-stream"}
    going = wire.http.post("/files", params={"path": path}, content=half(), headers=headers)
    upload = asyncio.create_task(going)
    await asyncio.wait_for(sent.wait(), 15)
    upload.cancel()
    await asyncio.wait({upload})


async def size_of(wire: Wire, path: str) -> int | None:
    found = await wire.call(FILES + "Stat", {"path": path})
    return int(found.json()["entry"]["size"]) if found.status_code == 200 else None


async def test_an_upload_that_is_cut_leaves_no_half(wire: Wire) -> None:
    async def has_some() -> bool:
        return bool(await size_of(wire, "new"))

    await cut(wire, "new", has_some)
    await eventually(lambda: is_now(wire, "new", None), what="gone")


async def test_an_upload_that_is_cut_changes_no_file_that_was_there(wire: Wire) -> None:
    async def as_it_was() -> bool:
        return (await get(wire, "in/old")).content == b"old"

    await put(wire, "in/old", b"old", **{"x-metadata-of": "before"})
    await cut(wire, "in/old", as_it_was)
    assert await as_it_was()
    (entry,) = (await wire.ask(FILES + "ListDir", path="in"))["entries"]
    assert entry["metadata"] == {"of": "before"}
    await put(wire, "in/old", bytes(3_000_000))
    assert await size_of(wire, "in/old") == 3_000_000


async def is_now(wire: Wire, path: str, size: int | None) -> bool:
    return await size_of(wire, path) == size


async def test_a_form_without_a_boundary_is_told_how_to_be_sent(wire: Wire) -> None:
    answer = await put(wire, "x", b"1", **{"content-type": "multipart/form-data"})
    assert answer.status_code == 415
    assert answer.json()["message"] == (
        "content-type: multipart/form-data without a boundary; "
        "with curl: -F file=@NAME; or send the content itself as application/octet-stream"
    )


async def test_gzip_that_is_none_is_refused(wire: Wire) -> None:
    for body in (b"not gzip at all", gzip.compress(b"x" * 1000)[:-10]):
        answer = await put(wire, "x", body, **{"content-encoding": "gzip"})
        assert answer.status_code == 400 and "gzip" in answer.json()["message"]
    odd = await put(wire, "x", b"x", **{"content-encoding": "br"})
    assert odd.status_code == 415
    twice = gzip.compress(b"one,") + gzip.compress(b"two")
    await put(wire, "x", twice, **{"content-encoding": "gzip"})
    assert (await get(wire, "x")).content == b"one,two"


async def test_much_that_is_packed_small_is_written_in_constant_memory(wire: Wire) -> None:
    await put(wire, "x", gzip.compress(bytes(30_000_000)), **{"content-encoding": "gzip"})
    assert (await wire.ask(FILES + "Stat", path="x"))["entry"]["size"] == "30000000"
    packed = await get(wire, "x", **{"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip" and len(packed.content) == 30_000_000
