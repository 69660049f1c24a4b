"""Pausing, snapshots, forks, steps and volumes over both interfaces, against real sandboxes."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule.model import MIB
from tests.api.client import Api, RpcFailure

pytestmark = pytest.mark.real


@pytest.fixture
async def made(api: Api) -> AsyncIterator[list[str]]:
    """Ids of sandboxes that end with the test."""
    ids: list[str] = []
    yield ids
    for id in ids:
        await api.rpc("delete", id=id)


async def forked(api: Api, made: list[str], **params: Any) -> list[str]:
    answer = await api.rpc("fork", **params)
    assert answer["copied"] == ["files", "limits", "env", "metadata", "timeouts", "volumes"]
    assert answer["not_copied"] == ["processes", "contexts", "terminals", "sessions"]
    ids = [each["id"] for each in answer["sandboxes"]]
    made += ids
    return ids


async def test_pause_and_resume(api: Api, box: str) -> None:
    assert (await api.rpc("pause", id=box))["state"] == "paused"
    with pytest.raises(RpcFailure, match="paused"):
        await api.rpc("exec", id=box, cmd=["true"])
    assert [each["id"] for each in (await api.rpc("list", state="paused"))["sandboxes"]] == [box]
    assert (await api.rpc("resume", id=box))["state"] == "running"
    assert await api.sh(box, "echo on") == "on\n"
    paused = await api.http.post(f"/v1/sandboxes/{box}/pause")
    assert (paused.status_code, paused.json()["state"]) == (200, "paused")
    assert (await api.http.post(f"/v1/sandboxes/{box}/resume")).json()["state"] == "running"


async def test_a_snapshot_keeps_files_under_a_name(api: Api, box: str, made: list[str]) -> None:
    await api.sh(box, "mkdir -p deep && echo kept > deep/file")
    snapshot = await api.rpc("snapshot", id=box, name="kept", metadata={"a": "b"})
    assert (snapshot["name"], snapshot["metadata"]) == ("kept", {"a": "b"})
    assert snapshot["files"] > 0
    try:
        assert snapshot in (await api.call("snapshot.v1.list", {}))["snapshots"]
        assert await api.call("snapshot.v1.get", {"name": "kept"}) == snapshot
        taken = await api.http.post(f"/v1/sandboxes/{box}/snapshots", json={"name": "kept"})
        assert (taken.status_code, taken.json()["error"]["code"]) == (409, "conflict")
        assert (await api.http.get("/v1/snapshots/kept")).json() == snapshot
        assert snapshot in (await api.http.get("/v1/snapshots")).json()["snapshots"]
        made.append((await api.rpc("create", template="bash", snapshot="kept"))["id"])
        assert await api.sh(made[0], "cat deep/file") == "kept\n"
    finally:
        assert await api.call("snapshot.v1.delete", {"name": "kept"}) == {"deleted": True}
    assert await api.sh(made[0], "cat deep/file") == "kept\n", "it has its files for itself"
    assert (await api.http.delete("/v1/snapshots/kept")).status_code == 404


async def test_a_snapshot_is_exported_and_imported(api: Api, box: str, made: list[str]) -> None:
    await api.sh(box, "echo moved > file; head -c 200000 /dev/urandom > big; ln -s /etc/passwd l")
    body = {"name": "leaves", "metadata": {"a": "b"}}
    assert (await api.http.post(f"/v1/sandboxes/{box}/snapshots", json=body)).status_code == 201
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
        for wrong in (archive[:-100], b"", archive + b"x"):
            assert (await api.http.put(url, content=wrong)).status_code == 400
        refused = await api.http.put("/v1/snapshots/leaves/archive", content=archive)
        assert refused.status_code == 409
        unknown = await api.http.put(url, content=archive, params={"template": "x"})
        assert unknown.status_code == 404
        answer = await api.http.put(url, content=gzip.compress(archive))
        assert (answer.status_code, answer.json()["metadata"]) == (201, {"a": "b"})
        made.append((await api.rpc("create", snapshot="comes"))["id"])
        found = await api.sh(made[0], "cat file; stat -c %s big; readlink l")
        assert found == "moved\n200000\n/etc/passwd\n"
    finally:
        await api.http.delete("/v1/snapshots/comes")
        await api.http.delete("/v1/snapshots/leaves")
    assert (await api.http.get("/v1/snapshots/leaves/archive")).status_code == 404


async def test_forks_are_independent(api: Api, box: str, made: list[str]) -> None:
    await api.sh(box, "echo common > file")
    for number, id in enumerate(await forked(api, made, id=box, count=2)):
        assert await api.sh(id, f"cat file; echo {number} > file") == "common\n"
    assert [await api.sh(id, "cat file") for id in (*made, box)] == ["0\n", "1\n", "common\n"]
    for count in (0, 21):
        with pytest.raises(RpcFailure) as refused:
            await api.rpc("fork", id=box, count=count)
        assert refused.value.code == "invalid"


async def test_each_exec_can_be_undone(api: Api, made: list[str]) -> None:
    box = (await api.rpc("create", template="bash", checkpoint="each"))["id"]
    made.append(box)
    at = f"/v1/sandboxes/{box}"
    await api.sh(box, "echo one > a; echo kept > b")
    await api.sh(box, "echo two > a; rm b; mkdir c")
    steps = await api.rpc("steps", id=box)
    assert (await api.http.get(f"{at}/steps")).json() == steps
    first, second = [each["step"] for each in steps["steps"]][-2:]
    found = await api.rpc("diff", id=box, **{"from": first, "to": second})
    params = {"from": first, "to": second}
    assert (await api.http.get(f"{at}/diff", params=params)).json() == found
    changes = {each["path"].rpartition("/")[2]: each["change"] for each in found["changes"]}
    assert changes == {"a": "modified", "b": "removed", "c": "added"}
    (branch,) = await forked(api, made, id=box, at=first)
    assert await api.sh(branch, "cat a b") == "one\nkept\n"
    await api.rpc("undo", id=box, to=first)
    assert await api.sh(box, "cat a b; ls; echo three > a") == "one\nkept\na\nb\n"
    fork = await api.http.post(f"{at}/fork", json={"count": 1, "at": first})
    made.append(fork.json()["sandboxes"][0]["id"])
    assert (await api.http.post(f"{at}/undo", json={"to": first})).status_code == 200
    assert await api.sh(box, "cat a") == "one\n"
    assert (await api.http.post(f"{at}/undo", json={"to": 9999})).status_code == 404


async def test_a_volume_from_create_to_delete(api: Api) -> None:
    made = await api.call("volume.v1.create", {"name": "data", "metadata": {"a": "b"}})
    assert made == await api.call("volume.v1.get", {"name": "data"})
    assert made in (await api.call("volume.v1.list", {}))["volumes"]
    mounts = [{"name": "data", "path": "/workspace/data", "read_only": False}]
    box = await api.rpc("create", template="bash", volumes=mounts)
    assert box["volumes"] == mounts
    await api.sh(box["id"], "echo kept > data/f")
    with pytest.raises(RpcFailure, match="in use") as refused:
        await api.call("volume.v1.delete", {"name": "data"})
    assert refused.value.code == "conflict"
    await api.rpc("delete", id=box["id"])
    assert (await api.call("volume.v1.delete", {"name": "data"}))["deleted"] is True
    with pytest.raises(RpcFailure, match="does not exist"):
        await api.rpc("create", template="bash", volumes=mounts)


async def test_volumes_over_rest(api: Api) -> None:
    made = await api.http.post("/v1/volumes", json={"name": "rest-data"})
    assert made.status_code == 201
    assert (await api.http.post("/v1/volumes", json={"name": "rest-data"})).status_code == 409
    assert (await api.http.get("/v1/volumes/rest-data")).json() == made.json()
    assert made.json() in (await api.http.get("/v1/volumes")).json()["volumes"]
    assert (await api.http.delete("/v1/volumes/rest-data")).json() == {"deleted": True}
    assert (await api.http.get("/v1/volumes/rest-data")).status_code == 404
    assert (await api.http.post("/v1/volumes", json={"name": "a/b"})).status_code == 400
    small = await api.http.post("/v1/volumes", json={"name": "rest-data", "size": 1000})
    assert small.status_code == 400 and small.json()["error"]["details"]["field"] == "size"


@pytest.mark.needs("root", "e2fsprogs")
async def test_a_volume_with_a_size_shows_it(api: Api) -> None:
    made = await api.call("volume.v1.create", {"name": "sized", "size": 20 * MIB})
    try:
        assert made["size"] == 20 * MIB and 0 < made["used"] < 20 * MIB
        assert made == await api.call("volume.v1.get", {"name": "sized"})
    finally:
        await api.call("volume.v1.delete", {"name": "sized"})
