"""REST: sandboxes, execs, files, archives and watches as resources."""

from __future__ import annotations

import io
import tarfile

import httpx
import pytest

from tests.api.client import Api, b64, events
from tests.support import eventually
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


async def test_a_sandbox_from_create_to_delete(api: Api) -> None:
    body = {"template": "bash", "metadata": {"k": "rest"}}
    once = {"Idempotency-Key": "rest-create"}
    made = await api.http.post("/v1/sandboxes", json=body, headers=once)
    url = f"/v1/sandboxes/{made.json()['id']}"
    assert made.status_code == 201
    again = await api.http.post("/v1/sandboxes", json=body, headers=once)
    assert again.json()["id"] == made.json()["id"]
    assert (await api.http.get(url)).json() == made.json()
    listed = await api.http.get("/v1/sandboxes", params={"metadata": "k=rest", "state": "running"})
    assert [s["id"] for s in listed.json()["sandboxes"]] == [made.json()["id"]]
    moved = await api.http.patch(url, json={"ttl_ms": 5_000_000})
    assert moved.json()["expires_at"] > made.json()["expires_at"]
    assert (await api.http.post(f"{url}/keepalive")).status_code == 200
    assert (await api.http.get(f"{url}/metrics")).json()["source"]
    reset = await api.http.post(f"{url}/reset")
    assert (reset.status_code, reset.json()["id"]) == (200, made.json()["id"])
    assert (await api.http.get("/v1/pool")).json()["shelves"] == []
    assert (await api.http.delete(url)).json() == {"deleted": True}
    assert (await api.http.get(url)).status_code == 410


async def test_a_file_from_write_to_delete(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/files/workspace/dir/f%20%E2%82%AC.bin"
    content = bytes(range(256)) * 300
    written = await api.http.put(url, content=content, params={"mode": "600"})
    assert written.json() == {"path": "/workspace/dir/f €.bin", "size": len(content)}
    got = await api.http.get(url)
    assert got.content == content
    assert got.headers["content-length"] == str(len(content))
    assert got.headers["content-disposition"] == "attachment"
    head = await api.http.head(url)
    assert (head.headers["content-length"], head.content) == (str(len(content)), b"")
    stat = await api.http.get(url.replace("/files/", "/stat/"))
    assert stat.json()["mode"] & 0o777 == 0o600
    assert (await api.http.patch(url, json={"mode": "755"})).status_code == 200
    assert (await api.http.put(url, content=b"+", params={"append": "true"})).json()[
        "size"
    ] == 76801
    taken = await api.http.put(url, content=b"", params={"exclusive": "true"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "conflict")
    assert (await api.http.delete(url)).status_code == 200
    assert (await api.http.get(url)).status_code == 404


@pytest.mark.parametrize(
    ("asked", "status", "part", "said"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=4-", 206, b"456789", "bytes 4-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=5-500", 206, b"56789", "bytes 5-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
        ("bytes=-0", 416, b"", "bytes */10"),
        ("bytes=5-2", 200, b"0123456789", None),
        ("bytes=0-1,3-4", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)
async def test_ranges(
    api: Api, box: str, asked: str, status: int, part: bytes, said: str | None
) -> None:
    url = f"/v1/sandboxes/{box}/files/workspace/f"
    await api.http.put(url, content=b"0123456789")
    answer = await api.http.get(url, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (status, part)
    assert answer.headers.get("content-range") == said


async def test_a_file_the_client_has_already(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/files/workspace/f"
    await api.http.put(url, content=b"one")
    tag = (await api.http.get(url)).headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = await api.http.get(url, headers={"If-None-Match": known})
        assert answer.status_code == 304, known
    await api.http.put(url, content=b"three")
    assert (await api.http.get(url, headers={"If-None-Match": tag})).content == b"three"
    stale = await api.http.get(url, headers={"Range": "bytes=0-1", "If-Range": tag})
    assert (stale.status_code, stale.content) == (200, b"three")


async def test_templates_capabilities_and_health(api: Api) -> None:
    names = [t["name"] for t in (await api.http.get("/v1/templates")).json()["templates"]]
    assert {"python", "node", "go", "bash"} <= set(names)
    found = (await api.http.get("/v1/capabilities")).json()
    local = found["providers"]["local"]
    assert local["usable"] is True
    assert local["isolation"] in ("namespaces", "landlock")
    assert all(f["ok"] or f["detail"] for f in local["findings"])
    assert (await api.http.get("/health")).json() == {"status": "ok"}
    page = await api.http.get("/docs")
    assert "/v1/sandboxes/{id}/files/{path}" in page.text
    assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text
    assert (await api.http.get("/")).headers["location"] == "/docs"


async def test_a_file_that_shrinks_while_it_is_read_is_visibly_cut(
    server: RealServer, api: Api, box: str
) -> None:
    await api.sh(box, "head -c 100000000 /dev/zero > large")
    async with api.http.stream("GET", f"/v1/sandboxes/{box}/files/workspace/large") as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        await api.sh(box, "truncate -s 1000 large")
        with pytest.raises(httpx.RemoteProtocolError, match=r"incomplete|without sending"):
            async for _ in pieces:
                pass
    log = (server.base / "log").read_text()
    assert "became smaller" in log
    assert "incident" not in log


async def test_execs_over_rest(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/execs"
    result = (await api.http.post(url, json={"cmd": ["echo", "hi"]})).json()
    assert (result["stdout"], result["exit_code"]) == ("hi\n", 0)
    listed = (await api.http.get(url)).json()["execs"]
    assert [e["cmd"] for e in listed if e["exec_id"] == result["exec_id"]] == [["echo", "hi"]]
    one = (await api.http.get(f"{url}/{result['exec_id']}?output=true")).json()
    assert (one["stdout"], one["exit"]["exit_code"], one["running"]) == ("hi\n", 0, False)
    assert (await api.http.get(f"{url}/nosuch")).status_code == 404
    body = {"commands": [{"cmd": "echo 1"}, {"code": "echo 2"}]}
    answer = await api.http.post(f"/v1/sandboxes/{box}/batch", json=body)
    assert [r["stdout"] for r in answer.json()["results"]] == ["1\n", "2\n"]
    once = {"Idempotency-Key": "rest-exec"}
    call = {"cmd": "echo x >> log; wc -l < log"}
    results = [(await api.http.post(url, json=call, headers=once)).json() for _ in range(3)]
    assert [r["stdout"] for r in results] == ["1\n"] * 3


async def test_an_exec_that_is_not_waited_for(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/execs"
    body = {"cmd": "cat; echo end; sleep 60", "stdin_open": True}
    started = await api.http.post(url, json=body)
    assert started.status_code == 202
    also = await api.http.post(url, json={"cmd": ["sleep", "60"]}, params={"wait": "false"})
    assert also.status_code == 202
    exec_url = f"{url}/{started.json()['exec_id']}"
    sent = await api.http.post(f"{exec_url}/stdin", content=b"\xff\x00raw", params={"eof": "true"})
    assert sent.json() == {"bytes": 5}

    async def echoed() -> bool:
        seen = await api.http.get(exec_url, params={"output": "true", "encoding": "base64"})
        return bool(seen.json()["stdout"] == b64(b"\xff\x00rawend\n"))

    await eventually(echoed, what="its input back")
    killed = await api.http.post(f"{exec_url}/kill", json={"signal": "TERM", "grace_ms": 5000})
    assert killed.json() == {"running": True}

    async def ended() -> bool:
        return (await api.http.get(exec_url)).json()["running"] is False

    await eventually(ended, what="its end")


async def test_folders_and_relative_paths(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}"
    assert (await api.http.put(f"{url}/dirs/workspace/x/y")).status_code == 200
    await api.http.put(f"{url}/files", content=b"1", params={"path": "x/y/f"})
    assert (await api.http.get(f"{url}/files", params={"path": "x/y/f"})).content == b"1"
    moved = await api.http.post(f"{url}/move", json={"from": "x/y", "to": "z"})
    assert moved.status_code == 200
    tree = (await api.http.get(f"{url}/dirs?recursive=true")).json()
    paths = sorted(e["path"] for e in tree["entries"])
    assert paths == ["/workspace/x", "/workspace/z", "/workspace/z/f"]
    cut = (await api.http.get(f"{url}/dirs/workspace?recursive=true&limit=2")).json()
    assert (len(cut["entries"]), cut["truncated"]) == (2, True)
    for folder in (f"{url}/files", f"{url}/files/workspace"):
        assert (await api.http.get(folder)).status_code == 400
    assert (await api.http.delete(f"{url}/files/workspace/z?recursive=true")).status_code == 200
    await api.sh(box, r"printf x > $(printf 'a\377b')")  # a name that is not UTF-8
    entries = (await api.http.get(f"{url}/dirs/workspace")).json()["entries"]
    entry = next(each for each in entries if each["name"].startswith("a"))
    assert (entry["name"], entry["name_base64"]) == ("a�b", b64(b"a\xffb"))
    assert (await api.http.get(f"{url}/files/workspace/a%FFb")).content == b"x"


async def test_archives_up_and_down(api: Api, box: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in (("a.txt", b"A" * 10), ("sub/b.txt", b"B" * 200_000)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    url = f"/v1/sandboxes/{box}/archive"
    up = await api.http.put(url, params={"path": "up"}, content=buffer.getvalue())
    assert up.json() == {"files": 2, "bytes": 200_010}
    down = await api.http.get(url, params={"path": "up"})
    assert down.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(down.content)) as tar:
        found = {m.name.removeprefix("./"): m.size for m in tar.getmembers() if m.isfile()}
    assert sorted(found.values()) == [10, 200_000]
    assert any(name.endswith("sub/b.txt") for name in found)
    assert (await api.http.get(url, params={"path": "nosuch"})).status_code == 404
    broken = await api.http.put(url, params={"path": "up"}, content=b"this is no tar" * 100)
    assert broken.status_code == 400


async def test_a_watch_sends_changes_and_why_it_ends(api: Api) -> None:
    box = (await api.rpc("create", template="bash"))["id"]
    seen: list[tuple[str, str]] = []
    params = {"recursive": "true"}
    async with api.http.stream("GET", f"/v1/sandboxes/{box}/watch", params=params) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        await api.sh(box, "echo 1 > new; mkdir d; rm new")
        async for event in events(answer):
            if event.name != "change":
                break
            seen.append((event.data["change"], event.data["path"].rsplit("/", 1)[-1]))
            if seen[-1] == ("remove", "new"):
                await api.rpc("delete", id=box)
    assert {("create", "new"), ("create", "d")} <= set(seen)
    assert (event.name, event.data["code"]) == ("error", "gone")
