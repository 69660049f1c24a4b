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


async def test_a_file_is_written_and_read_whole_or_in_part(wire: Wire) -> None:
    written = await put(wire, "a/b.txt", b"0123456789")
    assert written.json() == [{"path": "/workspace/a/b.txt", "name": "b.txt", "type": "file"}]
    read = await get(wire, "/workspace/a/b.txt")
    assert read.content == b"0123456789" and read.headers["content-length"] == "10"
    part = await get(wire, "a/b.txt", range="bytes=2-4")
    assert (part.status_code, part.content) == (206, b"234")
    for path, status in (("a/b.txt", 200), ("nothing", 404)):
        head = await wire.http.head("/files", params={"path": path}, headers=wire.headers)
        assert (head.status_code, head.content) == (status, b"")
    missing = await get(wire, "nothing")
    message = "path '/workspace/nothing' does not exist"
    assert (missing.status_code, missing.json()) == (404, {"code": 404, "message": message})


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
    named = {"file": ("wrong", b"x")}
    written = await wire.http.post("/files?path=right", files=named, headers=wire.headers)
    assert written.json()[0]["path"] == "/workspace/right"


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("text/plain", b"x", 415),
        ("multipart/form-data", b"1", 415),
        ("multipart/form-data; boundary=x", b"nonsense", 400),
        ("multipart/form-data; boundary=x", b"--x--\r\n", 400),
    ],
)
async def test_malformed_bodies_are_refused(
    wire: Wire, kind: str, body: bytes, status: int
) -> None:
    answer = await put(wire, "x", body, **{"content-type": kind})
    assert (answer.status_code, answer.json()["code"]) == (status, status)


async def test_calls_about_folders_and_their_errors(wire: Wire) -> None:
    await wire.ask(FILES + "MakeDir", path="d/e")
    await put(wire, "d/a", b"22")
    for call, path, status, code in (
        ("MakeDir", "d/e", 409, "already_exists"),
        ("MakeDir", "d/a", 400, "invalid_argument"),
        ("ListDir", "d/a", 400, "invalid_argument"),
        ("Stat", "d/x", 404, "not_found"),
    ):
        refused = await wire.call(FILES + call, {"path": path})
        assert (refused.status_code, refused.json()["code"]) == (status, code)
    moved = await wire.ask(FILES + "Move", source="d/a", destination="new/place/b")
    assert moved["entry"]["path"] == "/workspace/new/place/b"
    for _ in range(2):
        await wire.ask(FILES + "Remove", path="d")


@pytest.mark.slow  # 20,000 files
async def test_a_folder_is_listed_whole_or_not_at_all(wire: Wire) -> None:
    await wire.run("mkdir -p /workspace/d/many && cd /workspace/d/many && seq 20000 | xargs touch")
    whole = await wire.ask(FILES + "ListDir", path="d/many", depth=1)
    assert len(whole["entries"]) == 20_000
    assert whole["entries"][0]["path"] == "/workspace/d/many/1"
    refused = await wire.call(FILES + "ListDir", {"path": "d", "depth": 1000})
    assert refused.status_code == 400 and refused.json()["code"] == "invalid_argument"
    said = "more than 20000 entries, limit 20000; list a smaller folder, or with a smaller depth"
    assert refused.json()["message"] == said


def link(access: Access, id: str, path: str, operation: str, expires: int | None = None) -> str:
    """The address that the SDKs make of a path. It does not name the sandbox."""
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

    late = await http.get(link(access, box, "s", "read", int(time.time()) - 5))
    assert (late.status_code, late.json()["message"]) == (401, "signature is already expired")
    del wire.headers["x-access-token"]
    bare = await get(wire, "s")
    assert bare.json() == {"code": 401, "message": "missing signature query parameter"}


async def test_a_paused_sandbox_answers_as_one_that_does_not_run(wire: Wire, api: Api) -> None:
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
    """An upload whose client leaves in the middle, after more bytes than any buffer holds."""
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


async def test_broken_gzip_is_refused(wire: Wire) -> None:
    for body in (b"not gzip at all", gzip.compress(b"x" * 1000)[:-10]):
        answer = await put(wire, "x", body, **{"content-encoding": "gzip"})
        assert answer.status_code == 400 and "gzip" in answer.json()["message"]
    odd = await put(wire, "x", b"x", **{"content-encoding": "br"})
    assert odd.status_code == 415
    twice = gzip.compress(b"one,") + gzip.compress(b"two")
    await put(wire, "x", twice, **{"content-encoding": "gzip"})
    assert (await get(wire, "x")).content == b"one,two"
