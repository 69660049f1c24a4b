"""What users keep outlives the database, a kill and what was half done; with real boxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import NoSpaceError
from capsule.service import CreateRequest, Service, VolumeWish
from capsule.service.values import Volume
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


async def test_a_volume_that_nobody_knows_is_kept_until_somebody_says_whose_it_is(
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


async def test_what_was_half_made_or_half_removed_goes(folder: Path) -> None:
    """As a server leaves it that is killed in the middle."""
    async with serving(folder) as service:
        half = await service.volumes.create("half")
        await service.volumes.create("whole")
    kept = folder / "d" / "kept" / "volume"

    def undo() -> None:
        (kept / "half.json").rename(kept / f".{half.id}.json")

    await asyncio.to_thread(undo)
    async with serving(folder) as service:
        assert [volume.name for volume in service.volumes.list()] == ["whole"]
        assert await asyncio.to_thread(files, folder, "volume") == ["whole.json"]
        await service.volumes.create("half")


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


async def test_drafts_of_a_killed_server_are_removed_at_the_start(folder: Path) -> None:
    kept = folder / "d" / "kept"
    for kind in ("snapshot", "volume"):
        await asyncio.to_thread((kept / kind).mkdir, parents=True)
        for name in ("one.json.new", ".a1.json.new"):
            await asyncio.to_thread((kept / kind / name).write_bytes, b"{")
    async with serving(folder):
        assert files(folder, "snapshot") == files(folder, "volume") == []


async def test_what_cannot_be_recorded_is_not_kept_and_not_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise NoSpaceError("no space left for the server's records")

    async with serving(folder) as service:
        store = service._store
        id = await make(service, "echo x > f")
        with monkeypatch.context() as patch:
            patch.setattr(store, "save_kept", full)
            for work in (
                service.snapshots.make(id, "one", {}),
                service.volumes.create("one"),
            ):
                with pytest.raises(NoSpaceError):
                    await work
        assert layers(folder) == [] and service.volumes.list() == []
        await service.snapshots.make(id, "one", {})
        await service.volumes.create("one")
        with monkeypatch.context() as patch:
            patch.setattr(store, "remove_kept", full)
            for delete in (service.snapshots.delete, service.volumes.delete):
                with pytest.raises(NoSpaceError):
                    await delete("one")
        assert service.snapshots.find("one") and service.volumes.find("one")
    await asyncio.to_thread(lose_database, folder)
    async with serving(folder) as service:
        assert service.snapshots.find("one") and service.volumes.find("one")


async def test_records_from_before_get_their_files(folder: Path) -> None:
    def forget(remove: Callable[[Path], None]) -> None:
        for kind in ("snapshot", "volume"):
            for path in (folder / "d" / "kept" / kind).iterdir():
                remove(path)

    async with serving(folder) as service:
        await service.snapshots.make(await make(service, "echo x > f"), "one", {})
        volume: Volume = await service.volumes.create("one")
    await asyncio.to_thread(forget, Path.unlink)
    async with serving(folder) as service:
        assert service.volumes.list() == [volume]
    for kind in ("snapshot", "volume"):
        assert await asyncio.to_thread(files, folder, kind) == ["one.json"]
