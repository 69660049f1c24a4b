"""REST: the same verbs as resources, files of any kind, archives, watches, the documents."""

from __future__ import annotations

import asyncio
import io
import re
import tarfile
from pathlib import Path

import httpx
import pytest

from tests.api.client import Api, b64, events
from tests.support import eventually
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


async def test_a_sandbox_from_birth_to_end(api: Api) -> None:
    made = await api.http.post(
        "/v1/sandboxes", json={"template": "bash", "metadata": {"k": "rest"}}
    )
    url = f"/v1/sandboxes/{made.json()['id']}"
    assert made.status_code == 201
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
    gone = await api.http.get(url)
    assert gone.status_code in (404, 410)


async def test_idempotency_key_as_a_header(api: Api, box: str) -> None:
    headers = {"Idempotency-Key": "rest-create"}
    first = await api.http.post("/v1/sandboxes", headers=headers)
    again = await api.http.post("/v1/sandboxes", headers=headers)
    await api.http.delete(f"/v1/sandboxes/{first.json()['id']}")
    assert first.json()["id"] == again.json()["id"]
    url, body = f"/v1/sandboxes/{box}/execs", {"cmd": "echo x >> log; wc -l < log"}
    headers = {"Idempotency-Key": "rest-exec"}
    results = [(await api.http.post(url, json=body, headers=headers)).json() for _ in range(3)]
    assert [r["stdout"] for r in results] == ["1\n"] * 3


async def test_exec_and_its_traces(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/execs"
    result = (await api.http.post(url, json={"cmd": ["echo", "hi"]})).json()
    assert (result["stdout"], result["exit_code"]) == ("hi\n", 0)
    listed = (await api.http.get(url)).json()["execs"]
    assert [e["cmd"] for e in listed if e["exec_id"] == result["exec_id"]] == [["echo", "hi"]]
    one = (await api.http.get(f"{url}/{result['exec_id']}?output=true")).json()
    assert one["running"] is False
    assert (one["stdout"], one["exit"]["exit_code"]) == ("hi\n", 0)
    assert (await api.http.get(f"{url}/nosuch")).status_code == 404


async def test_start_type_and_kill(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/execs"
    body = {"cmd": "cat; echo end; sleep 60", "stdin_open": True}
    started = await api.http.post(url, json=body)
    exec_url = f"{url}/{started.json()['exec_id']}"
    assert started.status_code == 202
    sent = await api.http.post(f"{exec_url}/stdin", content=b"\xff\x00raw", params={"eof": "true"})
    assert sent.json() == {"bytes": 5}

    async def output() -> str:
        seen = await api.http.get(exec_url, params={"output": "true", "encoding": "base64"})
        return str(seen.json()["stdout"])

    await eventually(lambda: has_come(output, b64(b"\xff\x00rawend\n")), what="its input back")
    killed = await api.http.post(f"{exec_url}/kill", json={"signal": "TERM", "grace_ms": 5000})
    assert killed.json() == {"running": True}
    await eventually(lambda: ended(api, exec_url), what="its end")


async def has_come(output: object, expected: str) -> bool:
    assert callable(output)
    return bool(await output() == expected)


async def ended(api: Api, url: str) -> bool:
    return (await api.http.get(url)).json()["running"] is False


async def test_wait_false_answers_at_once(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/execs"
    started = await api.http.post(url, json={"cmd": ["sleep", "60"]}, params={"wait": "false"})
    assert started.status_code == 202
    assert started.elapsed.total_seconds() < 5


async def test_batch(api: Api, box: str) -> None:
    body = {"commands": [{"cmd": "echo 1"}, {"code": "echo 2"}]}
    answer = await api.http.post(f"/v1/sandboxes/{box}/batch", json=body)
    assert [r["stdout"] for r in answer.json()["results"]] == ["1\n", "2\n"]


async def test_a_file_from_birth_to_end(api: Api, box: str) -> None:
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


async def test_a_relative_path_goes_into_the_query(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/files"
    await api.http.put(url, content=b"here", params={"path": "a/b.txt"})
    assert await api.sh(box, "cat /workspace/a/b.txt") == "here"
    assert (await api.http.get(url, params={"path": "a/b.txt"})).content == b"here"
    assert (await api.http.get(url)).status_code == 400


async def test_a_name_that_is_not_utf8(api: Api, box: str) -> None:
    await api.sh(box, r"printf x > $(printf 'a\377b')")
    url = f"/v1/sandboxes/{box}/files/workspace/a%FFb"
    listing = (await api.http.get(f"/v1/sandboxes/{box}/dirs/workspace")).json()
    entry = next(e for e in listing["entries"] if e["name"].startswith("a"))
    assert entry["name"] == "a�b"
    assert entry["name_base64"] == b64(b"a\xffb")
    assert (await api.http.get(url)).content == b"x"
    assert (await api.http.delete(url)).status_code == 200
    assert await api.sh(box, "ls | wc -l") == "0\n"


@pytest.mark.parametrize(
    ("asked", "status", "part", "said"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=4-", 206, b"456789", "bytes 4-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=5-500", 206, b"56789", "bytes 5-9/10"),
        ("bytes=9-9", 206, b"9", "bytes 9-9/10"),
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


async def test_an_empty_file(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/files/workspace/empty"
    assert (await api.http.put(url, content=b"")).json()["size"] == 0
    assert (await api.http.get(url)).content == b""
    assert (await api.http.get(url, headers={"Range": "bytes=0-"})).status_code == 416


async def test_a_folder_is_no_file(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/files/workspace"
    assert (await api.http.head(url)).status_code == 400
    for headers in ({}, {"Range": "bytes=0-3"}, {"If-None-Match": "*"}):
        answer = await api.http.get(url, headers=headers)
        assert answer.status_code == 400
        assert "directory" in answer.json()["error"]["message"]


async def test_a_fifo_does_not_hang(api: Api, box: str) -> None:
    await api.sh(box, "mkfifo pipe")
    assert (await api.http.get(f"/v1/sandboxes/{box}/files/workspace/pipe")).status_code == 400
    assert (await api.http.put(f"/v1/sandboxes/{box}/files/workspace/pipe")).status_code < 500


async def test_folders(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}"
    assert (await api.http.put(f"{url}/dirs/workspace/x/y")).status_code == 200
    await api.http.put(f"{url}/files/workspace/x/y/f", content=b"1")
    moved = await api.http.post(f"{url}/move", json={"from": "x/y", "to": "z"})
    assert moved.status_code == 200
    tree = (await api.http.get(f"{url}/dirs?recursive=true")).json()
    assert sorted(e["path"] for e in tree["entries"]) == [
        "/workspace/x",
        "/workspace/z",
        "/workspace/z/f",
    ]
    cut = (await api.http.get(f"{url}/dirs/workspace?recursive=true&limit=2")).json()
    assert (len(cut["entries"]), cut["truncated"]) == (2, True)
    assert (await api.http.delete(f"{url}/files/workspace/z?recursive=true")).status_code == 200


async def test_archives_up_and_down(api: Api, box: str, tmp_path: Path) -> None:
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
    assert sorted(size for size in found.values()) == [10, 200_000]
    assert any(name.endswith("sub/b.txt") for name in found)
    assert (await api.http.get(url, params={"path": "nosuch"})).status_code == 404
    broken = await api.http.put(url, params={"path": "up"}, content=b"this is no tar" * 100)
    assert broken.status_code == 400


async def test_a_watch_tells_what_changes(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/watch"
    async with api.http.stream("GET", url, params={"recursive": "true"}) as answer:
        if answer.status_code != 200:
            pytest.fail((await answer.aread()).decode())
        assert answer.headers["content-type"].startswith("text/event-stream")
        await api.sh(box, "echo 1 > new; mkdir d; rm new")
        seen: set[tuple[str, str]] = set()
        async for event in events(answer):
            seen.add((event.data["change"], event.data["path"].rsplit("/", 1)[-1]))
            if ("remove", "new") in seen:
                break
    assert ("create", "new") in seen
    assert ("create", "d") in seen


async def test_what_the_server_offers(api: Api) -> None:
    names = [t["name"] for t in (await api.http.get("/v1/templates")).json()["templates"]]
    assert {"python", "node", "go", "bash"} <= set(names)
    found = (await api.http.get("/v1/capabilities")).json()
    local = found["providers"]["local"]
    assert local["usable"] is True
    assert local["isolation"] in ("namespaces", "landlock")
    assert all(f["ok"] or f["detail"] for f in local["findings"])
    assert (await api.http.get("/health")).json() == {"status": "ok"}


async def test_the_openapi_document_is_whole(api: Api) -> None:
    document = (await api.http.get("/openapi.json")).json()
    refs = set(
        re.findall(r'"#/components/schemas/([^"]+)"', (await api.http.get("/openapi.json")).text)
    )
    assert refs <= set(document["components"]["schemas"])
    assert "/v1/sandboxes/{id}/execs" in document["paths"]
    body = document["paths"]["/v1/sandboxes/{id}/execs"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/Start")
    assert "HTTPValidationError" not in document["components"]["schemas"]


async def test_the_docs_page_needs_nothing_from_elsewhere(api: Api) -> None:
    page = await api.http.get("/docs")
    assert page.status_code == 200
    assert "/v1/sandboxes/{id}/files/{path}" in page.text
    assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text
    assert (await api.http.get("/")).headers["location"] == "/docs"


async def test_a_watch_is_told_why_it_ends(api: Api) -> None:
    box = (await api.rpc("create", template="bash"))["id"]
    async with api.http.stream("GET", f"/v1/sandboxes/{box}/watch") as answer:
        assert answer.status_code == 200
        await api.rpc("delete", id=box)
        seen = [event async for event in events(answer)]
    assert [(e.name, e.data["code"]) for e in seen if e.name != "change"] == [("error", "gone")]


async def test_a_file_that_shrinks_while_it_is_read_is_seen_to_be_cut(
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


async def test_an_upload_that_breaks_off_leaves_nothing(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/files/workspace/half"
    await api.http.put(url, content=b"old")
    host, port = api.http.base_url.host, api.http.base_url.port
    _, writer = await asyncio.open_connection(host, port)
    head = f"PUT {url} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    writer.write(head.encode() + b"new" * 1000)
    await writer.drain()
    writer.close()
    files = "ls -A; cat half"
    await eventually(lambda: says(api, box, files, "half\nold"), what="the old file alone")


async def says(api: Api, box: str, script: str, expected: str) -> bool:
    return await api.sh(box, script) == expected


async def test_a_full_disk_is_507(api: Api) -> None:
    limits = {"disk": 8 * 1024 * 1024}
    made = (await api.http.post("/v1/sandboxes", json={"limits": limits})).json()
    if any(u["what"] == "disk" for u in made["unenforced"]):
        pytest.skip("this host cannot limit disks")
    url = f"/v1/sandboxes/{made['id']}"
    try:
        answer = await api.http.put(f"{url}/files/workspace/f", content=b"x" * 20_000_000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "no_space")
    finally:
        await api.http.delete(url)


async def test_hidden_uses_of_unknown_sandboxes(api: Api) -> None:
    url = "/v1/sandboxes/nosuchbox"
    answers: list[httpx.Response] = [
        await api.http.get(f"{url}/files/etc/passwd"),
        await api.http.put(f"{url}/files/tmp/x", content=b"x" * 1_000_000),
        await api.http.get(f"{url}/archive"),
        await api.http.put(f"{url}/archive", content=b""),
        await api.http.get(f"{url}/watch"),
        await api.http.get(f"{url}/execs/e1/stream"),
        await api.http.post(f"{url}/execs", json={"cmd": "true"}),
        await api.http.delete(url),
    ]
    assert [a.status_code for a in answers] == [404] * len(answers)
