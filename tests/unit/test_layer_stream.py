"""A stack of layers as one stream, whole or as what changed, and a layer written from one."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from capsule.errors import InvalidError
from capsule.providers.contract import Saved
from capsule.providers.local.layer_attributes import give
from capsule.providers.local.layer_diff import compare
from capsule.providers.local.layer_folder import MAX_DEPTH
from capsule.providers.local.layer_stream import told
from capsule.providers.local.layers import EXTENT, HEAD, Before, Layers
from capsule.providers.local.seen_folders import place_of
from capsule.providers.local.unpack import set_opaque

LARGE = 10**9


def written(layers: Layers, stack: Sequence[Path]) -> Saved:
    layers.prepare()
    whole = [*told(stack)]

    async def pieces() -> AsyncGenerator[bytes, None]:
        for piece in whole:
            yield piece

    return asyncio.run(layers.write("copy", pieces(), most_bytes=LARGE))


def whiteout(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


def stack_in(folder: Path) -> list[Path]:
    low, top = folder / "low" / "workspace", folder / "top" / "workspace"
    for path in (low / "gone", low / "hidden", low / "both", top / "hidden", top / "both"):
        path.mkdir(parents=True)
    (low / "gone" / "x").write_text("x")
    (low / "hidden" / "old").write_text("old")
    (low / "both" / "low").write_text("low")
    (low / "changed").write_text("before")
    whiteout(top / "gone")
    fd = os.open(top / "hidden", os.O_RDONLY)
    set_opaque(fd)
    os.close(fd)
    (top / "both" / "top").write_text("top")
    (top / "changed").write_text("after")
    os.link(top / "changed", top / "again")
    os.symlink("/etc/passwd", top / "link")
    (top / "shut").write_text("secret")
    (top / "shut").chmod(0)
    with (top / "holes").open("wb") as file:
        file.seek(5_000_000)
        file.write(b"end")
    os.utime(top / "both", ns=(1, 12_345_678_901))
    return [folder / "top", folder / "low"]


@pytest.mark.needs("root")  # to read a file of mode 0
def test_what_is_told_is_what_a_box_would_see(tmp_path: Path) -> None:
    stack = stack_in(tmp_path)
    layers = Layers(tmp_path / "layers", owner=None)
    saved = written(layers, stack)
    made = layers.path("copy") / "workspace"
    names = ["again", "both", "changed", "hidden", "holes", "link", "shut"]
    assert sorted(os.listdir(made)) == names
    assert os.listdir(made / "hidden") == [] and sorted(os.listdir(made / "both")) == ["low", "top"]
    assert (made / "again").read_text() == "after" and (made / "again").stat().st_nlink == 2
    assert os.readlink(made / "link") == "/etc/passwd"
    assert stat.S_IMODE((made / "shut").stat().st_mode) == 0
    assert (made / "both").stat().st_mtime_ns == 12_345_678_901
    assert (made / "holes").stat().st_size == 5_000_003 and saved.size < 100_000
    # A server that is not root keeps what it can read again.
    readable = Layers(tmp_path / "readable", owner=None, readable=True)
    written(readable, stack)
    shut = readable.path("copy") / "workspace" / "shut"
    assert (stat.S_IMODE(shut.stat().st_mode), shut.read_text()) == (0o600, "secret")


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def deep(layer: Path, name: str) -> Path:
    """A layer as deep as one may be, with a file at the bottom."""
    (layer / "workspace").mkdir(parents=True)
    fd = os.open(layer / "workspace", os.O_RDONLY)
    for _ in range(MAX_DEPTH - 2):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    return layer


def test_deep_folders_cost_no_descriptors(tmp_path: Path) -> None:
    """They are the whole server's, and a program in a sandbox chooses the depth."""
    base = [deep(tmp_path / f"base{n}", f"base{n}") for n in range(4)]
    old, new = deep(tmp_path / "old", "old"), deep(tmp_path / "new", "new")
    bottom = b"/workspace" + b"/d" * (MAX_DEPTH - 2)
    with few_descriptors(40):
        changes = compare([old, *base], [new, *base], 100)
        layers = Layers(tmp_path / "layers", owner=None)
        pieces = [*told([new, *base])]
    assert [(each.change, each.path) for each in changes] == [
        ("added", bottom + b"/new"),
        ("removed", bottom + b"/old"),
    ]
    assert sum(piece.endswith(b"/d/base0") for piece in pieces) == 1
    assert written(layers, [new, *base]).files == MAX_DEPTH - 1 + 5


def test_what_programs_noted_on_files_goes_with_them(tmp_path: Path) -> None:
    """But not what would rule an overlay."""
    file = tmp_path / "top" / "workspace" / "file"
    file.parent.mkdir(parents=True)
    file.write_text("x")
    noted = {"user.e2b.author": b"somebody", "user.\udcff": b"\0\xff", "user.empty": b""}
    for name, value in {**noted, "user.overlay.redirect": b"/etc"}.items():
        os.setxattr(file, name, value)
    written(Layers(tmp_path / "layers", owner=None), [tmp_path / "top"])
    copy = tmp_path / "layers" / "copy" / "workspace" / "file"
    assert {name: os.getxattr(copy, name) for name in os.listxattr(copy)} == noted


def test_attributes_that_are_cut_or_the_overlays_own_are_not_given(tmp_path: Path) -> None:
    cut = (b"\x09user.a", b"\x06user.a\0", b"\x06user.a\0\x05x", b"\x07user.\0a\0\0", b"\xff")
    name = b"user.overlay.opaque"
    with (tmp_path / "file").open("w") as file:
        for raw in cut:
            with pytest.raises(InvalidError, match="cannot be read"):
                give(file.fileno(), raw)
        give(file.fileno(), bytes([len(name)]) + name + b"\0\x01y")
        assert os.listxattr(file.fileno()) == []


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
