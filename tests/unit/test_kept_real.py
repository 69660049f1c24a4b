"""What users keep outlives the database, a kill and what was half done; with real boxes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from capsule.errors import NoSpaceError
from capsule.providers.local.layers import Layers
from capsule.providers.local.provider import LocalProvider
from capsule.service import CreateRequest, Service, VolumeWish
from capsule.service.volumes import Volumes
from tests.support.backends import layers
from tests.unit.test_service_real import folder, serving
from tests.unit.test_snapshots_real import make, restore, sh
from tests.unit.test_steps_real import stepping

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]
__all__ = ["folder"]

WISH = VolumeWish("data", "/workspace/data")


def lose_database(folder: Path) -> None:
    for path in (folder / "d").glob("capsule.db*"):
        path.unlink()


def files(folder: Path, kind: str) -> list[str]:
    return sorted(path.name for path in (folder / "d" / "kept" / kind).iterdir())


async def with_volume(service: Service, text: str, wish: VolumeWish = WISH) -> str:
    id = (await service.create(CreateRequest("bash", volumes=(wish,)))).id
    out = await sh(service, id, text)
    await service.delete(id)
    return out


async def test_volumes_and_snapshots_outlive_the_database(folder: Path) -> None:
    async with serving(folder) as service:
        data = await service.volumes.create("data", metadata={"a": "b"})
        await service.volumes.create("other")
        await service.volumes.delete("other")
        await with_volume(service, "echo kept > data/f")
        id = await stepping(service, "echo 1 > f", "echo 2 > f")
        low = await service.snapshots.make(id, "low", {"c": "d"})
        high_from = await restore(service, "low")
        await sh(service, high_from, "echo 3 > g")
        high = await service.snapshots.make(high_from, "high", {})
        await service.snapshots.make(id, "gone", {})
        await service.snapshots.delete("gone")
        await service.fork(id, 1)
    await asyncio.to_thread(lose_database, folder)
    async with serving(folder) as service:
        assert service.volumes.list() == [data]
        assert await with_volume(service, "cat data/f") == "kept\n"
        assert service.snapshots.list() == [low, high]
        assert await sh(service, await restore(service, "high"), "cat f g") == "2\n3\n"
        stacks = {layer.id for each in (low, high) for layer in each.layers}
        await service.reaper.tidy()
        assert set(layers(folder)) == stacks, "those of steps and forks are gone"
        for name in ("low", "high"):
            await service.snapshots.delete(name)
        await service.volumes.delete("data")
    async with serving(folder) as service:
        assert service.volumes.list() == [] and service.snapshots.list() == []
        assert layers(folder) == []
        for kind in ("volume", "snapshot"):
            assert await asyncio.to_thread(files, folder, kind) == []


async def test_a_volume_without_its_records_is_kept(
    folder: Path,
) -> None:
    async with serving(folder) as service:
        await service.volumes.create("data", tenant="blue")
        await service.volumes.create("data")
        await with_volume(service, "echo kept > data/f")
    kept = folder / "d/kept/volume"
    assert await asyncio.to_thread(files, folder, "volume") == ["blue@data.json", "data.json"]
    file = await asyncio.to_thread((kept / "data.json").read_bytes)
    await asyncio.to_thread(lose_database, folder)
    await asyncio.to_thread((kept / "data.json").unlink)
    for _ in range(2):
        async with serving(folder) as service:
            assert service.volumes.list() == []
            assert [each.name for each in service.volumes.list("blue")] == ["data"]
    await asyncio.to_thread((kept / "data.json").write_bytes, file)
    async with serving(folder) as service:
        assert await with_volume(service, "cat data/f") == "kept\n"


async def test_a_volume_whose_create_was_refused_never_comes_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full: neither its record could be written nor all of it removed."""

    async def full(*_: object) -> None:
        raise NoSpaceError("no space left on the disk")

    async with serving(folder) as service:
        with monkeypatch.context() as patch:
            patch.setattr(Volumes, "_note", full)
            patch.setattr(LocalProvider, "drop_volume", full)
            with pytest.raises(NoSpaceError):
                await service.volumes.create("data")
    async with serving(folder) as service:
        assert service.volumes.list() == []
        assert await service.volumes._volumed("local").volumes() == []
    assert files(folder, "volume") == []


async def test_while_a_file_cannot_be_read_no_layer_is_dropped(folder: Path) -> None:
    async with serving(folder) as service:
        id = await make(service, "echo x > f")
        await service.snapshots.make(id, "one", {})
    path = folder / "d/kept/snapshot/one.json"
    good = await asyncio.to_thread(path.read_text)
    assert json.loads(good)["template"] == "bash"
    await asyncio.to_thread(lose_database, folder)
    await asyncio.to_thread(path.write_text, good[:-20])
    async with serving(folder) as service:
        assert service.snapshots.list() == []
        await service.reaper.tidy()
        assert len(layers(folder)) == 1
    await asyncio.to_thread(path.write_text, good)
    async with serving(folder) as service:
        assert await sh(service, await restore(service, "one"), "cat f") == "x\n"


async def test_a_snapshot_is_recorded_when_its_layers_are_on_the_disk_and_not_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that crashes in between would keep the record alone."""
    settle, recorded = Layers.settle, list[list[str]]()

    async def looked_at(self: Layers) -> None:
        recorded.append(await asyncio.to_thread(files, folder, "snapshot"))
        await settle(self)

    monkeypatch.setattr(Layers, "settle", looked_at)
    async with serving(folder) as service:
        await service.snapshots.make(await make(service, "echo x > f"), "one", {})
        assert recorded == [[]]
        assert await asyncio.to_thread(files, folder, "snapshot") == ["one.json"]


async def test_drafts_of_a_killed_server_are_removed_at_the_start(folder: Path) -> None:
    kept = folder / "d" / "kept"
    for kind in ("snapshot", "volume"):
        await asyncio.to_thread((kept / kind).mkdir, parents=True)
        for name in ("one.json.new", ".a1.json.new"):
            await asyncio.to_thread((kept / kind / name).write_bytes, b"{")
    async with serving(folder):
        assert files(folder, "snapshot") == files(folder, "volume") == []
