"""What a box writes on, and an image that cannot be made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capsule.errors import InvalidError, UnavailableError
from capsule.model import MIB, Isolation, Limits
from capsule.providers.local import disk
from capsule.providers.local.disk import Disks, choose_backing

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


async def test_a_size_mkfs_refuses_is_the_callers_mistake(tmp_path: Path) -> None:
    (tmp_path / "disks").mkdir()
    disks = Disks(tmp_path, "loop", Path("/bin/false"))
    with pytest.raises(InvalidError, match=r"mkfs\.ext4 refuses"):
        await disks.entry("box", SMALL)
    assert os.listdir(tmp_path / "disks") == []
