"""A stack of layers told as one stream, and written again."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from capsule.providers.contract import Saved
from capsule.providers.local.layer_stream import told
from capsule.providers.local.layers import Layers
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


def test_what_is_told_is_what_a_box_would_see(tmp_path: Path) -> None:
    stack = stack_in(tmp_path)
    layers = Layers(tmp_path / "layers", owner=None)
    saved = written(layers, stack)
    made = layers.path("copy") / "workspace"
    assert sorted(os.listdir(made)) == [
        "again", "both", "changed", "hidden", "holes", "link", "shut",
    ]  # fmt: skip
    assert os.listdir(made / "hidden") == [] and sorted(os.listdir(made / "both")) == ["low", "top"]
    assert (made / "again").read_text() == "after" and (made / "again").stat().st_nlink == 2
    assert os.readlink(made / "link") == "/etc/passwd"
    assert stat.S_IMODE((made / "shut").stat().st_mode) == 0
    assert (made / "both").stat().st_mtime_ns == 12_345_678_901
    assert (made / "holes").stat().st_size == 5_000_003 and saved.size < 100_000


def test_a_server_that_is_not_root_keeps_what_it_can_read_again(tmp_path: Path) -> None:
    layers = Layers(tmp_path / "layers", owner=None, readable=True)
    written(layers, stack_in(tmp_path))
    made = layers.path("copy") / "workspace"
    assert stat.S_IMODE((made / "shut").stat().st_mode) == 0o600
    assert (made / "shut").read_text() == "secret"
