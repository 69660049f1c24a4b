"""Snapshots from archives: what is honest comes back as it was, what is hostile leaves nothing."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import stat
import tarfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.errors import (
    CapsuleError,
    ForbiddenError,
    InvalidError,
    NotSupportedError,
    TooLargeError,
)
from capsule.model import MIB
from capsule.providers.contract import Saved
from capsule.providers.local import layer_folder
from capsule.providers.local.layers import Layers
from capsule.service import snapshot_format
from capsule.service.snapshot_format import Manifest, member
from tests.unit.test_images import Entry, file, folder, hardlink, info, symlink, tar

MOST = 16 * MIB
TOP = folder("files/workspace")
ABOUT = Manifest(format="capsule-snapshot", version=1, template="bash", provider="local")


async def stream(data: bytes, size: int = 1000) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    made = Layers(tmp_path / "layers", owner=None)
    made.prepare()
    return made


async def take_in(layers: Layers, *entries: Entry, most: int = MOST) -> Saved:
    return await layers.take_in("one", stream(tar(*entries)), most_bytes=most)


async def given_out(layers: Layers, *ids: str, most: int = MOST) -> bytes:
    return b"".join([piece async for piece in layers.give_out(ids, most_bytes=most)])


async def test_files_come_back_as_they_were(layers: Layers) -> None:
    saved = await take_in(
        layers,
        folder("files"),
        folder("files/workspace", mode=0o750),
        file("files/workspace/a", b"content", mode=0o4755),
        file("files/workspace/.wh.a", b"a name like any other"),
        hardlink("files/workspace/b", "files/workspace/a"),
        symlink("files/workspace/out", "/etc/passwd"),
        folder("files/workspace/deep"),
        file("files/workspace/deep/zeros", bytes(3 * MIB) + b"end"),
        folder("files/tmp", mode=0o1777),
        folder("files/var"),
        folder("files/var/tmp", mode=0o1777),
        file("files/var/tmp/v"),
    )
    top = layers.folder / "one"
    assert sorted(os.listdir(top)) == ["tmp", "var-tmp", "workspace"]
    found = (top / "workspace/a").stat()
    assert stat.S_IMODE(found.st_mode) == 0o755 and found.st_nlink == 2
    assert os.readlink(top / "workspace/out") == "/etc/passwd"
    zeros = (top / "workspace/deep/zeros").stat()
    assert zeros.st_size == 3 * MIB + 3 and zeros.st_blocks * 512 < MIB
    assert stat.S_IMODE((top / "var-tmp").stat().st_mode) == 0o1777
    assert saved.files == 10 and saved.size < MIB
    again = await given_out(layers, "one")
    await layers.take_in("two", stream(again + bytes(1024)), most_bytes=MOST)
    assert await given_out(layers, "two") == again


HOSTILE: dict[str, list[Entry]] = {
    "dots": [TOP, file("files/workspace/../../../escape")],
    "absolute": [file("/files/workspace/a")],
    "outside": [file("escape")],
    "another place": [folder("files/etc"), file("files/etc/passwd")],
    "no parent": [TOP, file("files/workspace/missing/a")],
    "through a link": [TOP, symlink("files/workspace/l", "/tmp"), file("files/workspace/l/a")],
    "a place as a link": [symlink("files/workspace", "/etc")],
    "a place as a file": [file("files/tmp")],
    "hard link out": [TOP, hardlink("files/workspace/h", "/etc/passwd")],
    "hard link through a link": [
        TOP,
        symlink("files/workspace/l", "/etc"),
        hardlink("files/workspace/h", "files/workspace/l/passwd"),
    ],
    "device": [TOP, info("files/workspace/sda", tarfile.BLKTYPE, devmajor=8)],
    "whiteout": [TOP, info("files/workspace/gone", tarfile.CHRTYPE)],
    "sparse": [TOP, info("files/workspace/s", tarfile.GNUTYPE_SPARSE)],
    "twice": [TOP, file("files/workspace/a"), file("files/workspace/a", b"other")],
    "a file over a link": [TOP, symlink("files/workspace/a", "/x"), file("files/workspace/a")],
    "a NUL in a name": [TOP, info("x", pax_headers={"path": "files/workspace/a\0b"})],
}


@pytest.mark.parametrize("entries", HOSTILE.values(), ids=HOSTILE.keys())
async def test_what_cannot_be_of_a_sandbox_is_refused(
    layers: Layers, tmp_path: Path, entries: list[Entry]
) -> None:
    with pytest.raises(InvalidError):
        await take_in(layers, *entries)
    assert os.listdir(layers.folder) == [] and os.listdir(tmp_path) == ["layers"]


def attributes(file: Path) -> dict[str, bytes]:
    return {name: os.getxattr(file, name) for name in os.listxattr(file)}


async def test_of_attributes_no_more_is_taken_over_than_a_layer_keeps(layers: Layers) -> None:
    said = {
        "SCHILY.xattr.user.overlay.opaque": "y",
        "SCHILY.xattr.user%2Eoverlay.redirect": "/etc",
        "SCHILY.xattr.security.capability": "x",
        "SCHILY.xattr.user." + "n" * 255: "a name that is too long",
        "SCHILY.xattr.user.big": "x" * (33 * 1024),
        "SCHILY.xattr.user.kept": "yes",
    }
    shared = tarfile.TarInfo.create_pax_global_header({"SCHILY.xattr.user.all": "x"})
    archive = shared + tar(TOP, file("files/workspace/a", pax_headers=said))
    await layers.take_in("one", stream(archive), most_bytes=MOST)
    assert attributes(layers.folder / "one/workspace/a") == {"user.kept": b"yes"}


async def test_what_is_too_much_is_refused(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = info("files/workspace/huge", pax_headers={"size": str(2**40)})
    with pytest.raises(TooLargeError):
        await take_in(layers, TOP, huge)
    many = [file(f"files/workspace/{n}", bytes(MIB)) for n in range(17)]
    with pytest.raises(TooLargeError, match="holes counted"):
        await take_in(layers, TOP, *many)
    long = [folder("files/workspace" + "/d" * n) for n in range(300)]
    with pytest.raises(TooLargeError, match="deep"):
        await take_in(layers, *long)
    monkeypatch.setattr(layer_folder, "MAX_ENTRIES", 50)
    with pytest.raises(TooLargeError, match="50 files"):
        await take_in(layers, TOP, *(file(f"files/workspace/{n}") for n in range(60)))
    assert os.listdir(layers.folder) == []


async def test_a_sender_that_fails_or_is_cancelled_leaves_nothing(layers: Layers) -> None:
    whole = tar(TOP, file("files/workspace/a", bytes(MIB)))
    begun = asyncio.Event()

    async def failing() -> AsyncGenerator[bytes, None]:
        yield whole  # all of it: only the error says that it is not good
        raise ForbiddenError("gone")

    async def hanging() -> AsyncGenerator[bytes, None]:
        yield whole[:2000]
        begun.set()
        await asyncio.Event().wait()

    with pytest.raises(ForbiddenError):
        await layers.take_in("one", failing(), most_bytes=MOST)
    task = asyncio.create_task(layers.take_in("one", hanging(), most_bytes=MOST))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(layers.folder) == []


def whole(*entries: Entry, about: Manifest = ABOUT) -> bytes:
    async def run() -> bytes:
        members = stream(tar(*entries).rstrip(b"\0").ljust(512, b"\0"))
        return b"".join([piece async for piece in snapshot_format.pack(about, members)])

    return asyncio.run(run())


GOOD = whole(TOP, file("files/workspace/a", bytes(range(256)) * 2))
PACKED = gzip.compress(GOOD)


async def read(data: bytes, *, most: int = MOST, size: int = 1000) -> bytes:
    opened = await snapshot_format.unpack(stream(data, size), most_bytes=most)
    return b"".join([piece async for piece in opened.members])


async def test_an_archive_is_a_tar_that_people_can_look_into() -> None:
    with tarfile.open(fileobj=io.BytesIO(GOOD)) as archive:
        names = archive.getnames()
        digest = archive.extractfile("sha256")
        assert digest is not None and len(digest.read()) == 65
    assert names == ["manifest.json", "files/workspace", "files/workspace/a", "sha256"]
    for size in (1, 511, 100_000):
        assert (await read(GOOD, size=size)).endswith(bytes(1024))
    assert await read(gzip.compress(GOOD)) == await read(GOOD)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_byte_may_differ_and_none_may_be_missing(at: int, by: int) -> None:
    changed = GOOD[:at] + bytes([GOOD[at] ^ by]) + GOOD[at + 1 :]
    for data in (changed, GOOD[:at], PACKED[: at % len(PACKED)]):
        with pytest.raises(CapsuleError):
            asyncio.run(read(data))


async def test_what_is_no_snapshot_says_so() -> None:
    for data in (b"", b"hello", tar(TOP), bytes(5000), b"\x1f\x8b garbage", gzip.compress(b"")):
        with pytest.raises(InvalidError):
            await read(data)
    with pytest.raises(TooLargeError, match="manifest"):
        await read(member("manifest.json", bytes(2 * MIB)))
    newer = member("manifest.json", b'{"format": "capsule-snapshot", "version": 2,'
                   b' "template": "bash", "provider": "local"}')  # fmt: skip
    with pytest.raises(NotSupportedError, match="format 2"):
        await read(newer)


async def test_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(GOOD[:1024] + bytes(80 * MIB))
    with pytest.raises(TooLargeError, match="100 to 1"):
        await read(packed, most=1024 * MIB, size=65536)
    monkeypatch.setattr(snapshot_format, "GIB", 0)
    with pytest.raises(TooLargeError, match="more than"):
        await read(packed, most=10 * MIB, size=65536)
