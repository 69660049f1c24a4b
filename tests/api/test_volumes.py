"""Volumes over both interfaces, against real sandboxes."""

from __future__ import annotations

import pytest

from capsule.model import MIB
from tests.api.client import Api, RpcFailure

pytestmark = pytest.mark.real


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


@pytest.mark.needs("root")
async def test_a_volume_with_a_size_shows_it(api: Api) -> None:
    made = await api.call("volume.v1.create", {"name": "sized", "size": 20 * MIB})
    try:
        assert made["size"] == 20 * MIB and 0 < made["used"] < 20 * MIB
        assert made == await api.call("volume.v1.get", {"name": "sized"})
    finally:
        await api.call("volume.v1.delete", {"name": "sized"})
