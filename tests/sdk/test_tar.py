"""Folders as archives: round trips, and archives that try to write elsewhere."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from capsule_sdk import CapsuleError
from capsule_sdk._tar import Unpacker, pack
from capsule_sdk.values import Transfer


def unpack(data: bytes, folder: Path, *, step: int = 700) -> Transfer:
    unpacker = Unpacker(folder)
    try:
        for start in range(0, len(data), step):
            unpacker.feed(data[start : start + step])
        return unpacker.finish()
    finally:
        unpacker.close()


def archive(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def file(name: str, content: bytes = b"evil") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def folder(name: str) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE
    return info, b""


def test_a_folder_survives_the_round_trip(tmp_path: Path) -> None:
    source = tmp_path / "source"
    deep = source / "a" / ("n" * 90) / ("ü" * 90)
    deep.mkdir(parents=True)
    (deep / "data.bin").write_bytes(bytes(range(256)) * 5000)
    (source / "empty").write_bytes(b"")
    (source / "run.sh").write_text("echo hi")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("a")
    (source / "nothing").mkdir()
    moved = unpack(b"".join(pack(source)), tmp_path / "target")
    target = tmp_path / "target"
    copied = target / deep.relative_to(source) / "data.bin"
    assert copied.read_bytes() == (deep / "data.bin").read_bytes()
    assert (target / "empty").read_bytes() == b""
    assert os.access(target / "run.sh", os.X_OK)
    assert (target / "link").readlink() == Path("a")
    assert (target / "nothing").is_dir()
    assert (moved.files, moved.bytes, moved.skipped) == (3, 1_280_007, ())


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("step", [1, 511, 512, 100_000])
def test_archives_of_every_format_are_read(tmp_path: Path, format: int, step: int) -> None:
    name = f"{'d' * 60}/{'f' * 60}" if format == tarfile.USTAR_FORMAT else "x" * 250
    data = archive(file(name, b"content"), file("second", b"s" * 513), format=format)
    unpack(data, tmp_path, step=step)
    assert (tmp_path / name).read_bytes() == b"content"
    assert (tmp_path / "second").read_bytes() == b"s" * 513


@pytest.mark.parametrize(
    "members",
    [
        pytest.param([file("../evil")], id="parent"),
        pytest.param([file("/tmp/capsule-test-evil")], id="absolute"),
        pytest.param([file("a/../../evil")], id="parent inside"),
        pytest.param([link("out", ".."), file("out/evil")], id="through a link"),
        pytest.param([link("out", "/"), file("out/tmp/evil")], id="through an absolute link"),
        pytest.param(
            [folder("a"), link("a/up", ".."), link("b", "a/up/.."), file("b/evil")],
            id="through a chain of links",
        ),
        pytest.param([link("hard", "../secret", tarfile.LNKTYPE)], id="hard link"),
        pytest.param([folder("d"), link("d", ".."), file("d/evil")], id="folder becomes a link"),
    ],
)
def test_nothing_is_written_outside(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    target = tmp_path / "deep" / "target"
    (tmp_path / "secret").write_text("secret")
    before = sorted(tmp_path.rglob("*"))
    unpack(archive(*members), target)
    outside = [p for p in tmp_path.rglob("*") if target not in (p, *p.parents)]
    assert sorted([*before, tmp_path / "deep"]) == sorted(outside)
    assert (tmp_path / "secret").read_text() == "secret"
    assert not Path("/tmp/capsule-test-evil").exists()
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target.resolve()), path


def test_an_existing_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "target"
    target.mkdir()
    (target / "name").symlink_to(victim)
    unpack(archive(file("name", b"new")), target)
    assert victim.read_text() == "mine"
    assert (target / "name").read_bytes() == b"new"
    assert not (target / "name").is_symlink()


def test_devices_and_pipes_are_not_made(tmp_path: Path) -> None:
    info = tarfile.TarInfo("null")
    info.type, info.devmajor, info.devminor = tarfile.CHRTYPE, 1, 3
    pipe = tarfile.TarInfo("pipe")
    pipe.type = tarfile.FIFOTYPE
    moved = unpack(archive((info, b""), (pipe, b"")), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(moved.skipped) == 2


@pytest.mark.parametrize("mode", [0o4755, 0o6777, 0o777])
def test_no_file_becomes_setuid_or_writable_for_others(tmp_path: Path, mode: int) -> None:
    info, content = file("program")
    info.mode = mode
    unpack(archive((info, content)), tmp_path)
    assert (tmp_path / "program").stat().st_mode & 0o7022 == 0


def cut(data: bytes) -> bytes:
    return data[: len(data) // 3]


def garble(data: bytes) -> bytes:
    return b"\xff" * 512 + data


@pytest.mark.parametrize("damage", [cut, garble])
def test_a_damaged_archive_is_an_error(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    data = damage(archive(file("a", b"x" * 5000)))
    with pytest.raises(CapsuleError, match="archive"):
        unpack(data, tmp_path)
