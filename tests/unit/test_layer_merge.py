"""The upper layers of a stack as one: it shows what they showed.

What overlayfs makes of merged layers is in test_steps_real.py and test_step_trees_real.py.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from capsule.errors import NotFoundError
from capsule.model import Layer
from capsule.providers.contract import Saved
from capsule.providers.local.layer_diff import compare
from capsule.providers.local.layer_stream import told
from capsule.providers.local.layer_tar import Packer
from capsule.providers.local.layers import Layers
from capsule.service.steps import MAX_DEPTH, to_merge
from tests.unit.test_layer_stream import whiteout

NAMES = ("a", "b", "c", os.fsdecode(b"\xff \n"))
LARGE = 10**9
SHUT = 0o000 if os.geteuid() == 0 else 0o400  # what is in it is compared


def opaque(path: Path) -> None:
    os.setxattr(path, "user.overlay.opaque", b"y")


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    made = Layers(tmp_path / "layers", owner=None)
    made.prepare()
    return made


def merge(layers: Layers, stack: Sequence[str], count: int) -> Saved:
    return asyncio.run(layers.merge("merged", stack, count=count))


class RandomStack:
    """Random layers, lowest first: anything there can be over anything else."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._pick = random.Random(seed)
        self._folder = folder
        self._count = 0
        self._files: list[Path] = []
        count = self._pick.randint(2, 7)
        self.ids = [f"{seed}layer{n}" for n in reversed(range(count))]  # topmost first
        for id in reversed(self.ids):
            self._files = []
            self._fill(self._make(folder / id / "workspace"), 3)

    def _make(self, path: Path) -> Path:
        path.mkdir(parents=True)
        return path

    def _fill(self, folder: Path, depth: int) -> None:
        for name in NAMES:
            if self._pick.random() < 0.6:
                self._entry(folder / name, depth)
        self._count += 1
        folder.chmod(self._pick.choice((0o755, 0o711, 0o1777, 0o700)))
        os.utime(folder, ns=(0, self._count * 1_000_000_007))

    def _entry(self, path: Path, depth: int) -> None:
        self._count += 1
        match self._pick.choice(("folder", "folder", "opaque", "file", "link", "hard", "gone")):
            case "folder" if depth:
                self._fill(self._make(path), depth - 1)
            case "opaque" if depth:
                opaque(self._make(path))
                self._fill(path, depth - 1)
            case "link":
                os.symlink(f"to {self._count}", path)
            case "hard" if self._files:
                os.link(self._pick.choice(self._files), path)
            case "gone":
                whiteout(path)
            case _:
                path.write_text(f"file {self._count}")
                os.setxattr(path, "user.note", b"%d" % self._count)
                path.chmod(self._pick.choice((0o644, SHUT, 0o755)))
                self._files.append(path)


def archive(paths: Sequence[Path]) -> bytes:
    return b"".join(Packer(paths, most_bytes=LARGE).pieces())


def stream(paths: Sequence[Path]) -> bytes:
    return b"".join(told(paths))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_lies_on_what_the_merged_layer_shows_the_same(layers: Layers, seed: int) -> None:
    ids = RandomStack(layers.folder, seed).ids
    before = [layers.path(id) for id in ids]
    tops = {id: stream([layers.path(id)]) for id in ids}
    for count in range(2, len(ids) + 1):
        merge(layers, ids, count)
        after = [layers.path("merged"), *before[count:]]
        assert archive(after) == archive(before) and stream(after) == stream(before)
        assert compare(before, after, 10) == []
        layers.remove("merged")
    assert {id: stream([layers.path(id)]) for id in ids} == tops, "those merged stay as they are"


def test_files_are_the_same_and_counted_once(layers: Layers) -> None:
    low, top = layers.folder / "low" / "workspace", layers.folder / "top" / "workspace"
    for path in (low, top):
        path.mkdir(parents=True)
    (low / "old").write_text("gone with the merge")
    (low / "kept").write_text("12345")
    (top / "old").write_text("123")
    os.link(top / "old", top / "again")
    os.link(low / "kept", layers.folder / "elsewhere")
    (top / "old").chmod(0)
    os.utime(top, ns=(1, 12_345_678_901))
    saved = merge(layers, ["top", "low"], 2)
    assert (saved.size, saved.files, saved.copied) == (8, 4, 0)
    made = layers.path("merged") / "workspace"
    for name, of in (("old", top), ("again", top), ("kept", low)):
        assert (made / name).lstat() == (of / name).lstat()
    assert made.stat().st_mtime_ns == 12_345_678_901


def left(layers: Layers, ids: Sequence[str]) -> list[str]:
    return sorted(set(os.listdir(layers.folder)) - set(ids))


def test_a_merge_that_cannot_be_leaves_nothing(layers: Layers) -> None:
    ids = RandomStack(layers.folder, 1).ids
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotFoundError, match="not on this host"):
        merge(layers, [*ids, "missing"], 2)
    assert left(layers, ids) == []
    assert len(os.listdir("/proc/self/fd")) <= before


def stack_of(*files: int) -> list[Layer]:
    return [Layer(f"{n}", files=count) for n, count in enumerate(files)]


@pytest.mark.parametrize("seed", range(4))
def test_a_file_is_merged_a_few_times_and_stacks_stay_bounded(seed: int) -> None:
    pick = random.Random(seed)
    stack, written, linked = stack_of(20_000), 20_000, 0
    for _ in range(3_000):
        count = to_merge(stack, len(stack) - MAX_DEPTH)
        if count:
            files = sum(layer.files for layer in stack[:count])
            linked += files
            stack = [*stack_of(files), *stack[count:]]
        assert len(stack) <= MAX_DEPTH
        new = pick.choice((1, 1, 1, 5, 40, pick.randint(1, 2_000)))
        written += new
        stack = [*stack_of(new), *stack]
    assert linked < 4 * written
