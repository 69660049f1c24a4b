"""A stream that tells no more than what changed, from an agent that may be anybody's."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from capsule.errors import InvalidError
from capsule.providers.contract import Saved
from capsule.providers.local.layers import EXTENT, HEAD, Before, Layers
from capsule.providers.local.seen_folders import place_of

SEEN = frozenset(
    place_of(path, inode, opaque=False)
    for path, inode in ((b"workspace", 1), (b"workspace/d", 2), (b"workspace/d/in", 3))
)


def entry(kind: str, path: str, *, inode: int = 0, target: str = "") -> bytes:
    head = HEAD.pack(kind.encode(), 0o755, 1_000, 0, inode, len(path), len(target))
    return head + path.encode() + target.encode() + (EXTENT.pack(0, 0) if kind == "f" else b"")


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    made = Layers(tmp_path / "layers", owner=None)
    made.prepare()
    for name in ("first", "second"):
        (made.folder / name / "workspace" / "d" / "in").mkdir(parents=True)
        (made.folder / name / "workspace" / "d" / name).touch()
    (made.folder / "first" / "workspace" / "d" / "in" / "x").touch()
    os.mknod(made.folder / "second" / "workspace" / "d" / "gone", stat.S_IFCHR, os.makedev(0, 0))
    (made.folder / "first" / "workspace" / "d" / "gone").touch()
    return made


def write(layers: Layers, *entries: bytes, ids: Sequence[str] = ("second", "first")) -> Saved:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"".join(entries)

    before = Before(ids, SEEN, delta=True)
    return asyncio.run(layers.write("made", pieces(), most_bytes=10_000, before=before))


WORKSPACE = entry("e", "workspace", inode=1)


def test_a_folder_that_has_not_changed_is_there_if_something_in_it_has(layers: Layers) -> None:
    told = (WORKSPACE, entry("e", "workspace/d", inode=2), entry("f", "workspace/d/in"))
    saved = write(layers, *told)
    assert saved.delta and saved.files == 3
    made = layers.path("made") / "workspace"
    assert os.listdir(made) == ["d"] and os.listdir(made / "d") == ["in"]
    assert made.stat().st_mtime == 1_000 and stat.S_IMODE(made.stat().st_mode) == 0o755


def test_what_is_not_told_of_a_changed_folder_is_gone(layers: Layers) -> None:
    write(layers, WORKSPACE, entry("d", "workspace/d", inode=2), entry("u", "workspace/d/second"))
    made = layers.path("made") / "workspace" / "d"
    assert sorted(os.listdir(made)) == ["first", "in"], "what was gone before is no more so now"
    assert all(stat.S_ISCHR((made / name).lstat().st_mode) for name in os.listdir(made))


def test_a_new_folder_hides_the_one_before(layers: Layers) -> None:
    write(layers, WORKSPACE, entry("d", "workspace/d", inode=9), entry("f", "workspace/d/x"))
    made = layers.path("made") / "workspace" / "d"
    assert os.listdir(made) == ["x"] and os.getxattr(made, "user.overlay.opaque") == b"y"


@pytest.mark.parametrize(
    "told",
    [
        [entry("e", "workspace/d", inode=9)],
        [entry("d", "workspace/d", inode=9), entry("u", "workspace/d/x")],
        [entry("d", "workspace/d", inode=9), entry("e", "workspace/d/in", inode=3)],
        [entry("e", "workspace/in", inode=3)],
        [entry("u", "workspace/d/first")],
        [entry("d", "workspace/d", inode=2), entry("u", "workspace/d/gone")],
        [entry("d", "workspace/d", inode=2), entry("u", "workspace/d/new")],
        [entry("f", "elsewhere/x")],
        [entry("d", "workspace/../..", inode=9)],
        [entry("d", "workspace/d/../../first", inode=9)],
        [entry("u", "workspace/..")],
        [entry("d", "workspace/d", inode=2), entry("d", "workspace/d", inode=2)],
        [entry("h", "workspace/h", target="workspace/d/first")],
    ],
)
def test_what_cannot_be_is_refused(layers: Layers, told: Sequence[bytes]) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidError):
        write(layers, WORKSPACE, *told)
    assert sorted(layers.ids()) == ["first", "second"]
    assert len(os.listdir("/proc/self/fd")) <= open_before
