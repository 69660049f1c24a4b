"""Pausing, snapshots, forks and steps over both interfaces, against real sandboxes."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.client import Api, RpcFailure

pytestmark = pytest.mark.real


@pytest.fixture
async def made(api: Api) -> AsyncIterator[list[str]]:
    """Ids of sandboxes that end with the test."""
    ids: list[str] = []
    yield ids
    for id in ids:
        await api.rpc("delete", id=id)


@pytest.fixture
async def stepping(api: Api, made: list[str]) -> str:
    created = await api.rpc("create", template="bash", checkpoint="each")
    made.append(created["id"])
    return made[0]


async def forked(api: Api, made: list[str], **params: Any) -> list[str]:
    answer = await api.rpc("fork", **params)
    assert answer["copied"] == ["files", "limits", "env", "metadata", "timeouts", "volumes"]
    assert answer["not_copied"] == ["processes", "contexts", "terminals", "sessions"]
    ids = [each["id"] for each in answer["sandboxes"]]
    made += ids
    return ids


def last_two(answer: dict[str, Any]) -> list[int]:
    return [each["step"] for each in answer["steps"]][-2:]


async def test_what_is_paused_says_so_and_goes_on(api: Api, box: str) -> None:
    assert (await api.rpc("pause", id=box))["state"] == "paused"
    with pytest.raises(RpcFailure, match="paused"):
        await api.rpc("exec", id=box, cmd=["true"])
    assert [each["id"] for each in (await api.rpc("list", state="paused"))["sandboxes"]] == [box]
    assert (await api.rpc("resume", id=box))["state"] == "running"
    assert await api.sh(box, "echo on") == "on\n"


async def test_pausing_over_rest(api: Api, box: str) -> None:
    paused = await api.http.post(f"/v1/sandboxes/{box}/pause")
    assert (paused.status_code, paused.json()["state"]) == (200, "paused")
    assert (await api.http.post(f"/v1/sandboxes/{box}/resume")).json()["state"] == "running"


async def test_files_are_kept_under_a_name(api: Api, box: str, made: list[str]) -> None:
    await api.sh(box, "mkdir -p deep && echo kept > deep/file")
    snapshot = await api.rpc("snapshot", id=box, name="kept", metadata={"a": "b"})
    assert (snapshot["name"], snapshot["metadata"], snapshot["files"] > 0) == (
        "kept",
        {"a": "b"},
        True,
    )
    try:
        names = [each["name"] for each in (await api.call("snapshot.v1.list", {}))["snapshots"]]
        assert "kept" in names
        assert await api.call("snapshot.v1.get", {"name": "kept"}) == snapshot
        with pytest.raises(RpcFailure) as taken:
            await api.rpc("snapshot", id=box, name="kept")
        assert taken.value.code == "conflict"
        made.append((await api.rpc("create", template="bash", snapshot="kept"))["id"])
        assert await api.sh(made[0], "cat deep/file") == "kept\n"
    finally:
        assert await api.call("snapshot.v1.delete", {"name": "kept"}) == {"deleted": True}
    assert await api.sh(made[0], "cat deep/file") == "kept\n", "it has its files for itself"
    with pytest.raises(RpcFailure) as gone:
        await api.call("snapshot.v1.get", {"name": "kept"})
    assert gone.value.code == "not_found"


async def test_snapshots_over_rest(api: Api, box: str) -> None:
    answer = await api.http.post(f"/v1/sandboxes/{box}/snapshots", json={"name": "by-rest"})
    assert answer.status_code == 201
    assert (await api.http.get("/v1/snapshots/by-rest")).json() == answer.json()
    assert answer.json() in (await api.http.get("/v1/snapshots")).json()["snapshots"]
    assert (await api.http.delete("/v1/snapshots/by-rest")).status_code == 200
    assert (await api.http.delete("/v1/snapshots/by-rest")).status_code == 404


async def test_a_snapshot_leaves_and_comes_back_over_rest(
    api: Api, box: str, made: list[str]
) -> None:
    await api.sh(box, "echo moved > file; head -c 200000 /dev/urandom > big; ln -s /etc/passwd l")
    await api.rpc("snapshot", id=box, name="leaves", metadata={"a": "b"})
    answer = await api.http.get("/v1/snapshots/leaves/archive")
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.headers["content-disposition"] == 'attachment; filename="leaves.tar"'
    archive = answer.content
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        about = tar.extractfile("manifest.json")
        assert about is not None and json.load(about)["template"] == "bash"
        assert tar.getmember("files/workspace/l").issym()
    url = "/v1/snapshots/comes/archive"
    try:
        for wrong, status in ((archive[:-100], 400), (b"", 400), (archive + b"x", 400)):
            assert (await api.http.put(url, content=wrong)).status_code == status
        refused = await api.http.put("/v1/snapshots/leaves/archive", content=archive)
        assert refused.status_code == 409
        assert (
            await api.http.put(url, content=archive, params={"template": "x"})
        ).status_code == 404
        answer = await api.http.put(url, content=gzip.compress(archive))
        assert (answer.status_code, answer.json()["metadata"]) == (201, {"a": "b"})
        made.append((await api.rpc("create", snapshot="comes"))["id"])
        found = await api.sh(made[0], "cat file; stat -c %s big; readlink l")
        assert found == "moved\n200000\n/etc/passwd\n"
    finally:
        await api.http.delete("/v1/snapshots/comes")
        await api.http.delete("/v1/snapshots/leaves")
    assert (await api.http.get("/v1/snapshots/leaves/archive")).status_code == 404


async def test_forks_go_their_own_ways(api: Api, box: str, made: list[str]) -> None:
    await api.sh(box, "echo common > file")
    for number, id in enumerate(await forked(api, made, id=box, count=3)):
        assert await api.sh(id, f"cat file; echo {number} > file") == "common\n"
    assert [await api.sh(id, "cat file") for id in made] == ["0\n", "1\n", "2\n"]
    assert await api.sh(box, "cat file") == "common\n"
    for count in (0, 21):
        with pytest.raises(RpcFailure) as refused:
            await api.rpc("fork", id=box, count=count)
        assert refused.value.code == "invalid"


async def test_each_exec_can_be_undone(api: Api, stepping: str, made: list[str]) -> None:
    await api.sh(stepping, "echo one > a; echo kept > b")
    await api.sh(stepping, "echo two > a; rm b; mkdir c")
    first, second = [each["step"] for each in (await api.rpc("steps", id=stepping))["steps"]][-2:]
    found = await api.rpc("diff", id=stepping, **{"from": first, "to": second})
    changes = {
        each["path"].removeprefix("/workspace/"): each["change"] for each in found["changes"]
    }
    assert changes == {"a": "modified", "b": "removed", "c": "added"}
    (branch,) = await forked(api, made, id=stepping, at=first)
    assert await api.sh(branch, "cat a b") == "one\nkept\n"
    await api.rpc("undo", id=stepping, to=first)
    assert await api.sh(stepping, "cat a b; ls") == "one\nkept\na\nb\n"


async def test_steps_over_rest(api: Api, stepping: str, made: list[str]) -> None:
    at = f"/v1/sandboxes/{stepping}"
    await api.sh(stepping, "echo one > a")
    await api.sh(stepping, "echo two > a")
    first, second = last_two((await api.http.get(f"{at}/steps")).json())
    diff = await api.http.get(f"{at}/diff", params={"from": first, "to": second})
    assert [each["change"] for each in diff.json()["changes"]] == ["modified"]
    fork = await api.http.post(f"{at}/fork", json={"count": 1, "at": first})
    assert fork.status_code == 201
    made.append(fork.json()["sandboxes"][0]["id"])
    assert (await api.http.post(f"{at}/undo", json={"to": first})).status_code == 200
    assert await api.sh(stepping, "cat a") == "one\n"
    assert (await api.http.post(f"{at}/undo", json={"to": 9999})).status_code == 404
