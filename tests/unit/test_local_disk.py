"""What a box writes on, and how its image is made."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path

import pytest

from capsule.errors import InvalidError, UnavailableError
from capsule.model import GIB, MIB, Isolation, Limits
from capsule.providers.local import disk
from capsule.providers.local.disk import Disks, choose_backing, image_size

SMALL = Limits(disk=64 * MIB, inodes=1000)


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    made = Disks(tmp_path, "loop", disk.find_mkfs())
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
    assert choose_backing(Isolation.LANDLOCK, "auto", loop=loop, mkfs=mkfs) == "dir"
    with pytest.raises(UnavailableError, match="no usable"):
        choose_backing(Isolation.NAMESPACES, "loop", loop=loop, mkfs=not loop)


async def test_each_backing_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    tmpfs = await Disks(Path("/unused"), "tmpfs", None).entry("box", SMALL)
    assert tmpfs == {"kind": "tmpfs", "size": 64 * MIB, "inodes": 1005}
    plain = await Disks(tmp_path, "dir", None).entry("box", SMALL)
    assert plain == {"kind": "dir", "path": f"{tmp_path}/boxes/box"}
    assert image_size(Limits(disk=GIB, inodes=65_536)) == (GIB, 65_536 + disk.RESERVED_INODES)
    assert image_size(Limits(disk=4 * MIB, inodes=65_536)) == (4 * MIB, 4096)


@pytest.mark.needs("e2fsprogs")
async def test_one_image_serves_all_boxes_of_a_size(tmp_path: Path, disks: Disks) -> None:
    entries = await asyncio.gather(*(disks.entry(str(n), SMALL) for n in range(8)))
    assert len({entry["template"] for entry in entries}) == 1
    (image,) = (tmp_path / "disks").iterdir()
    assert image.stat().st_size == 64 * MIB
    assert image.stat().st_blocks * 512 < MIB, "the image is sparse"
    mkfs = await asyncio.to_thread(disk.find_mkfs)
    dump = [str(mkfs).replace("mkfs.ext4", "dumpe2fs"), "-h", str(image)]
    shown = await asyncio.to_thread(subprocess.run, dump, capture_output=True, check=True)
    (free,) = re.findall(rb"Free inodes: *(\d+)", shown.stdout)
    assert int(free) >= SMALL.inodes + len(disk.DIRS)


async def test_a_size_mkfs_refuses_is_the_callers_mistake(tmp_path: Path) -> None:
    (tmp_path / "disks").mkdir()
    disks = Disks(tmp_path, "loop", Path("/bin/false"))
    with pytest.raises(InvalidError, match=r"mkfs\.ext4 refuses"):
        await disks.entry("box", SMALL)
    assert os.listdir(tmp_path / "disks") == []
