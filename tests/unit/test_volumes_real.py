"""Volumes in real boxes: shared, kept, read-only where asked, and never a way out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    InvalidError,
    NotFoundError,
    NotSupportedError,
)
from capsule.model import MIB
from capsule.service import CreateRequest, ExecCall, Service, VolumeWish
from tests.support import backends, eventually
from tests.unit.test_service_real import folder, serving
from tests.unit.test_snapshots_real import sh

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]
__all__ = ["folder"]

DATA = "/workspace/data"


async def make(service: Service, *wishes: VolumeWish, **options: object) -> str:
    request = CreateRequest("bash", volumes=wishes, **options)  # type: ignore[arg-type]
    return (await service.create(request)).id


async def test_it_is_shared_and_outlives_sandboxes_and_the_server(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        await service.volumes.create("one", metadata={"a": "b"})
        wish = VolumeWish("one", DATA)
        first, second = await make(service, wish), await make(service, wish)
        await sh(service, first, "mkdir data/d; echo x > data/d/f; chmod 600 data/d/f")
        assert await sh(service, second, "cat data/d/f; echo y >> data/d/f") == "x\n"
        assert await sh(service, first, "cat data/d/f; stat -c %u data data/d/f") == (
            "x\ny\n1000\n1000\n"
        )
        await service.delete(first)
    async with serving(folder) as service:
        assert service.volumes.find("one").metadata == {"a": "b"}
        assert await sh(service, second, "cat data/d/f") == "x\ny\n"
        with pytest.raises(ConflictError, match="in use") as refused:
            await service.volumes.delete("one")
        assert refused.value.details["sandbox_ids"] == [second]
        await service.delete(second)
        third = await make(service, wish)
        assert await sh(service, third, "cat data/d/f") == "x\ny\n"
        await service.delete(third)
        await service.volumes.delete("one")
        assert await asyncio.to_thread(backends.of(folder).volumes, folder) == []
        with pytest.raises(NotFoundError):
            await make(service, wish)


def devices(folder: Path) -> list[str]:
    """The loop devices that volumes below this folder have."""
    found = []
    for at in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(at.read_text().strip())
    return [path for path in found if path.startswith(f"{folder}/d/volumes/")]


async def test_a_size_is_kept_to_or_refused(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        if not backends.of(folder).sized:
            with pytest.raises(NotSupportedError, match="hold volumes to a size"):
                await service.volumes.create("one", size=20 * MIB)
            assert service.volumes.list() == []
            return
        with pytest.raises(InvalidError, match="out of range"):
            await service.volumes.create("one", size=1000)
        made = await service.volumes.create("one", size=32 * MIB)
        assert made.size == 32 * MIB
        wish = VolumeWish("one", DATA)
        first, second = await make(service, wish), await make(service, wish)
        assert len(await asyncio.to_thread(devices, folder)) == 1
        await sh(service, first, "head -c 15M /dev/urandom > data/f; md5sum < data/f > data/sum")
        look = "md5sum < data/f | cmp - data/sum && echo same"
        assert await sh(service, second, look) == "same\n"
        full = "head -c 40M /dev/urandom > data/g; stat -c %s data/g"
        done = await service.exec(second, ExecCall(("sh", "-c", full)))
        assert b"No space left" in done.stderr and int(done.stdout) < 20 * MIB
        used = (await service.volumes.look(made)).used
        assert used is not None and 25 * MIB < used <= 33 * MIB
        await sh(service, first, "rm data/g; sync data/f")
        await service.delete(first)
    async with serving(folder) as service:
        assert service.volumes.find("one") == made
        assert await sh(service, second, look) == "same\n"
        await service.delete(second)
        await eventually(lambda: none(devices, folder), what="the device to be let go")
        third = await make(service, wish)
        assert await sh(service, third, look) == "same\n"
        await service.delete(third)
        await service.volumes.delete("one")
        assert await asyncio.to_thread(os.listdir, folder / "d" / "volumes") == []
        await eventually(lambda: none(devices, folder), what="the device to be let go")


async def none(find: Callable[[Path], list[str]], folder: Path) -> bool:
    return not await asyncio.to_thread(find, folder)


async def test_read_only_is_read_only(folder: Path) -> None:
    async with serving(folder) as service:
        await service.volumes.create("one")
        writer = await make(service, VolumeWish("one", DATA))
        reader = await make(service, VolumeWish("one", "/workspace/deep/down", read_only=True))
        await sh(service, writer, "echo x > data/f")
        assert await sh(service, reader, "cat deep/down/f; ls -A deep") == "x\ndown\n"
        for attempt in ("echo y > deep/down/f", "rm deep/down/f", "chmod 777 deep/down/f"):
            done = await service.exec(reader, ExecCall(("sh", "-c", attempt)))
            assert done.exit.exit_code != 0 and b"ead-only" in done.stderr
        assert await sh(service, writer, "cat data/f") == "x\n"


async def test_several_at_once_and_none_where_it_must_not_be(folder: Path) -> None:
    async with serving(folder) as service:
        for name in ("one", "two"):
            await service.volumes.create(name)
        first, second = VolumeWish("one", "/workspace/a"), VolumeWish("two", "/workspace/b")
        id = await make(service, first, second)
        assert await sh(service, id, "echo 1 > a/f; echo 2 > b/f; cat a/f b/f") == "1\n2\n"
        assert [v.path for v in service.get(id).volumes] == ["/workspace/a", "/workspace/b"]
        for path in ("/etc", "/workspace", "/workspace/../etc", "/workspace//x", "data", "/tmp/x"):
            with pytest.raises(CapsuleError):
                await make(service, VolumeWish("one", path))
        with pytest.raises(InvalidError, match="inside another"):
            await make(service, VolumeWish("one", DATA), VolumeWish("two", f"{DATA}/x"))
        with pytest.raises(InvalidError, match="once"):
            await make(service, first, VolumeWish("one", "/workspace/b"))
        with pytest.raises(ConflictError):
            await service.volumes.create("one")


async def test_a_link_in_a_snapshot_leads_no_volume_elsewhere(folder: Path) -> None:
    async with serving(folder) as service:
        await service.volumes.create("one")
        first = await make(service)
        await sh(service, first, "ln -s /etc data; touch file")
        await service.snapshots.make(first, "trap", {})
        for path in (DATA, "/workspace/file/data"):
            request = CreateRequest(snapshot="trap", volumes=(VolumeWish("one", path),))
            with pytest.raises((InvalidError, ConflictError), match="mount point"):
                await service.create(request)


async def test_snapshots_and_steps_leave_volumes_out_and_forks_have_them(folder: Path) -> None:
    async with serving(folder) as service:
        await service.volumes.create("one")
        id = await make(service, VolumeWish("one", DATA), checkpoint="each")
        await sh(service, id, "head -c 1000000 /dev/zero > data/big; echo x > own")
        assert service.steps.list(id)[-1].layers[0].size < 1000
        made = await service.snapshots.make(id, "s", {})
        assert made.size < 1000
        (fork,) = await service.fork(id, 1)
        assert await sh(service, fork.id, "stat -c %s data/big; cat own") == "1000000\nx\n"
        await service.steps.undo(id, 0)
        assert await sh(service, id, "ls; stat -c %s data/big") == "data\n1000000\n"


async def test_after_a_reset_no_program_from_before_writes_to_a_volume(folder: Path) -> None:
    """Its old box may be there for a while after the answer; none of its programs is."""
    async with serving(folder) as service:
        await service.volumes.create("one")
        id = await make(service, VolumeWish("one", DATA))
        beats = "while :; do for n in 1 2 3; do (echo x > data/beat$n) & done; wait; done"
        start = f"setsid sh -c '{beats}' >/dev/null 2>&1 & while [ ! -e data/beat3 ]; do :; done"
        await sh(service, id, start)
        await service.reset(id)
        answered = time.time()
        await asyncio.sleep(0.3)  # the time in which they would have written
        last = await sh(service, id, "stat -c %.9Y data/beat*")
        assert max(map(float, last.split())) <= answered
        assert len(last.split()) == 3


async def test_no_tenant_has_all_that_looks_into_volumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsule.service.volume_files.MOST", 3)
    monkeypatch.setattr("capsule.service.volume_files.EACH", 2)
    async with serving(folder) as service, contextlib.AsyncExitStack() as reading:

        async def read(name: str, tenant: str) -> None:
            """And go on doing so."""
            volume = await service.volumes.create(name, tenant=tenant)
            async with service.volume_files.open(volume) as look:
                await look.files.write(f"{look.root}/f", b"x" * (8 * MIB))
                await reading.enter_async_context(look.files.read(f"{look.root}/f"))

        await read("one", "blue")
        await read("two", "blue")
        with pytest.raises(CapacityError, match=r"2 volumes of yours are being read .* limit 2"):
            await read("three", "blue")
        idle = await service.volumes.create("idle", tenant="red")
        async with service.volume_files.open(idle):
            pass
        await read("one", "green")  # instead of the idle one
        with pytest.raises(CapacityError, match=r"3 volumes are being read .* limit 3"):
            await read("one", "yellow")
