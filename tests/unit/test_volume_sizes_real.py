"""Volumes with a size: room is reserved for them, and a damaged one is repaired.

Only the local provider holds volumes to a size, and only as root.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from capsule.errors import NoSpaceError
from capsule.model import MIB
from capsule.providers.local import sized
from capsule.service import VolumeWish
from tests.support import eventually
from tests.unit.test_service_real import folder, serving
from tests.unit.test_snapshots_real import sh
from tests.unit.test_volumes_real import DATA, devices, make, none

pytestmark = [
    pytest.mark.real,
    pytest.mark.needs("root", "e2fsprogs"),
    pytest.mark.timeout(90),
]
__all__ = ["folder"]


def image_of(folder: Path) -> Path:
    (found,) = (folder / "d" / "volumes").glob("*.disk/*.img")
    return found


def reserved(image: Path) -> bool:
    found = image.stat()
    return found.st_blocks * 512 >= found.st_size


def punch(image: Path) -> None:
    """Free what nobody has written: how servers before made them."""
    subprocess.run(["fallocate", "--dig-holes", image], check=True)


def damage(image: Path) -> None:
    """As the kernel does it when it meets an error."""
    subprocess.run(["tune2fs", "-E", "force_fsck", image], check=True, capture_output=True)


async def test_room_is_reserved_and_stays_so(folder: Path) -> None:
    async with serving(folder) as service:
        made = await service.volumes.create("one", size=64 * MIB)
        image = await asyncio.to_thread(image_of, folder)
        assert await asyncio.to_thread(reserved, image)
        assert (await service.volumes.look(made)).used in range(4 * MIB, 8 * MIB)
        await asyncio.to_thread(punch, image)  # it is of an older server
        assert not await asyncio.to_thread(reserved, image)
        problem = (await service.volumes.look(made)).problem or ""
        assert "bytes are not reserved" in problem and "free some space" in problem
        wish = VolumeWish("one", DATA)
        id = await make(service, wish)
        assert await asyncio.to_thread(reserved, image)
        assert service.get(id).unenforced == service.get(await make(service)).unenforced
        await sh(
            service, id, "head -c 40M /dev/urandom > data/f; sync data/f; rm data/f; sync data"
        )
        assert await asyncio.to_thread(reserved, image)
        assert (await service.volumes.look(made)).problem is None


async def test_where_there_is_no_room_to_reserve_it_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as service:
        await service.volumes.create("one", size=64 * MIB)
        image = await asyncio.to_thread(image_of, folder)
        await asyncio.to_thread(punch, image)
        monkeypatch.setattr(sized, "room_on", lambda folder: (0, 0))
        id = await make(service, VolumeWish("one", DATA))
        (gap,) = (each for each in service.get(id).unenforced if each.what == "volume one")
        assert "bytes are not reserved" in gap.why
        await service.delete(id)
        with pytest.raises(NoSpaceError, match=f"{64 * MIB} bytes .* 0 are free"):
            await service.volumes.create("two", size=64 * MIB)


async def test_a_damaged_one_is_repaired_before_it_is_mounted_or_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as service:
        made = await service.volumes.create("one", size=32 * MIB)
        image = await asyncio.to_thread(image_of, folder)
        wish = VolumeWish("one", DATA)
        with monkeypatch.context() as patch:
            patch.setattr(sized, "find_fsck", lambda: None)
            await asyncio.to_thread(damage, image)
            assert "had an error" in ((await service.volumes.look(made)).problem or "")
            first = await make(service, wish)
            (gap,) = (each for each in service.get(first).unenforced if each.what == "volume one")
            assert "had an error" in gap.why and "e2fsprogs" in gap.fix
            await sh(service, first, "echo x > data/f; sync data/f")
        second = await make(service, wish)  # it is in use, and never repaired then
        assert "volume one" in {each.what for each in service.get(second).unenforced}
        for id in (first, second):
            await service.delete(id)
        await eventually(lambda: none(devices, folder), what="the device to be let go")
        third = await make(service, wish)
        assert "volume one" not in {each.what for each in service.get(third).unenforced}
        assert (await service.volumes.look(made)).problem is None
        assert await sh(service, third, "cat data/f") == "x\n"
