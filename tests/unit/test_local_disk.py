"""What a box writes on, and how its image is made."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from capsule.errors import InvalidError, UnavailableError
from capsule.model import GIB, MIB, Isolation, Limits
from capsule.providers.local import disk
from capsule.providers.local.disk import Disks, choose_backing, image_size
from tests.support import component_missing

SMALL = Limits(disk=64 * MIB, inodes=1000)


@pytest.fixture
def mkfs() -> Path:
    found = disk.find_mkfs()
    if found is None:
        component_missing("mkfs.ext4 is not installed (e2fsprogs)")
    return found


@pytest.fixture
def disks(tmp_path: Path, mkfs: Path) -> Disks:
    made = Disks(tmp_path, "loop", mkfs)
    made.prepare()
    return made


@pytest.mark.parametrize(
    ("setting", "loop", "mkfs", "expected"),
    [
        ("auto", True, True, "loop"),
        ("auto", False, True, "tmpfs"),
        ("auto", True, False, "tmpfs"),
        ("memory", True, True, "tmpfs"),
        ("loop", True, True, "loop"),
    ],
)
def test_the_best_backing_is_chosen(setting: str, loop: bool, mkfs: bool, expected: str) -> None:
    assert choose_backing(Isolation.NAMESPACES, setting, loop=loop, mkfs=mkfs) == expected


def test_without_namespaces_nothing_can_be_mounted() -> None:
    assert choose_backing(Isolation.LANDLOCK, "auto", loop=True, mkfs=True) == "dir"


def test_a_backing_that_is_asked_for_and_missing_is_an_error() -> None:
    with pytest.raises(UnavailableError, match="no usable mkfs"):
        choose_backing(Isolation.NAMESPACES, "loop", loop=True, mkfs=False)


def test_an_image_leaves_most_of_itself_for_data() -> None:
    assert image_size(Limits(disk=GIB, inodes=65_536)) == (GIB, 65_536 + disk.RESERVED_INODES)
    assert image_size(Limits(disk=4 * MIB, inodes=65_536)) == (4 * MIB, 4096)


async def test_a_tmpfs_is_sized() -> None:
    disks = Disks(Path("/unused"), "tmpfs", None)
    assert await disks.entry("box", SMALL) == {"kind": "tmpfs", "size": 64 * MIB, "inodes": 1005}


async def test_a_plain_directory_is_the_boxes_own(tmp_path: Path) -> None:
    disks = Disks(tmp_path, "dir", None)
    assert await disks.entry("box", SMALL) == {"kind": "dir", "path": f"{tmp_path}/boxes/box"}
    assert disks.directory("box") == tmp_path / "boxes" / "box"


async def test_one_image_serves_all_boxes_of_a_size(tmp_path: Path, disks: Disks) -> None:
    entries = await asyncio.gather(*(disks.entry(str(n), SMALL) for n in range(8)))
    assert len({entry["template"] for entry in entries}) == 1
    images = os.listdir(tmp_path / "disks")
    assert len(images) == 1
    image = tmp_path / "disks" / images[0]
    assert image.stat().st_size == 64 * MIB
    assert image.stat().st_blocks * 512 < MIB, "the image is sparse"


async def test_an_image_has_room_for_all_the_inodes(disks: Disks, mkfs: Path) -> None:
    image = (await disks.entry("box", SMALL))["template"]
    shown = await asyncio.to_thread(
        subprocess.run,
        [str(mkfs.with_name("dumpe2fs")), "-h", image],
        capture_output=True,
        text=True,
        check=True,
    )
    free = next(line for line in shown.stdout.splitlines() if line.startswith("Free inodes"))
    assert int(free.split()[-1]) >= SMALL.inodes + len(disk.DIRS)


async def test_a_size_mkfs_refuses_is_the_callers_mistake(tmp_path: Path) -> None:
    (tmp_path / "disks").mkdir()
    disks = Disks(tmp_path, "loop", Path("/bin/false"))
    with pytest.raises(InvalidError, match=r"mkfs\.ext4 refuses"):
        await disks.entry("box", SMALL)
    assert os.listdir(tmp_path / "disks") == []


async def test_images_nobody_used_lately_are_forgotten(tmp_path: Path, disks: Disks) -> None:
    for number in range(disk.MAX_TEMPLATES):
        old = tmp_path / "disks" / f"{number}-1.img"
        old.touch()
        os.utime(old, (number, number))
    await disks.entry("box", SMALL)
    left = os.listdir(tmp_path / "disks")
    assert len(left) == disk.MAX_TEMPLATES
    assert "0-1.img" not in left
