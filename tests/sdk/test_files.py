"""Files of a sandbox: small and large, folders both ways, changes as they happen."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule_sdk import (
    AsyncCapsule,
    Capsule,
    CapsuleClient,
    Change,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from tests.sdk.crooked import answer, crooked_server, hang_up, result
from tests.sdk.test_rpc import SANDBOX
from tests.support import wait_for

MIB = 1024 * 1024


@pytest.mark.parametrize("size", [0, 1, 18 * 1024, 256 * 1024, 256 * 1024 + 1, 3 * MIB])
def test_content_of_any_size_comes_back_as_it_was(capsule: Capsule, size: int) -> None:
    content = os.urandom(size)
    written = capsule.write_file("/workspace/data", content)
    assert (written.path, written.size) == ("/workspace/data", size)
    assert capsule.read_file("/workspace/data") == content
    assert b"".join(capsule.read_stream("/workspace/data")) == content


def test_text_is_utf8(capsule: Capsule) -> None:
    capsule.write_file("grüße.txt", "schön ✓")
    assert capsule.read_file_text("grüße.txt") == "schön ✓"


def chunks() -> Iterator[bytes]:
    yield b"one "
    yield b"two"


def test_content_may_come_from_many_places(capsule: Capsule, tmp_path: Path) -> None:
    local = tmp_path / "local.bin"
    local.write_bytes(b"from a path")
    with local.open("rb") as file:
        capsule.write_file("a", file)
    capsule.write_file("b", local)
    capsule.write_file("c", chunks())
    capsule.write_file("d", io.BytesIO(b"in memory"))
    capsule.write_file("e", bytearray(b"array"))
    said = [capsule.read_file_text(name) for name in "abcde"]
    assert said == ["from a path", "from a path", "one two", "in memory", "array"]


def test_a_file_opened_as_text_is_refused(capsule: Capsule, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("text")
    with (tmp_path / "t").open() as file, pytest.raises(InvalidError, match="rb"):
        capsule.write_file("x", file)  # type: ignore[arg-type]


def test_a_piece_that_is_empty_does_not_end_the_content(capsule: Capsule) -> None:
    pieces: list[Any] = [b"one ", b"", bytearray(b"two"), memoryview(b" three")]
    capsule.write_file("f", iter(pieces))
    assert capsule.read_file_text("f") == "one two three"
    capsule.write_file("f", memoryview(b"view"))
    assert capsule.read_file_text("f") == "view"


async def test_nor_does_it_with_asyncio(async_capsule: AsyncCapsule) -> None:
    await async_capsule.write_file("f", iter([b"one ", b"", b"two"]))
    assert await async_capsule.read_file_text("f") == "one two"


@pytest.mark.parametrize("piece", ["text", 3, None])
def test_a_piece_that_is_none_is_refused(capsule: Capsule, piece: Any) -> None:
    with pytest.raises(InvalidError, match="the content comes as"):
        capsule.write_file("f", iter([b"one", piece]))


def test_a_file_without_a_size_is_sent_to_its_end(capsule: Capsule, tmp_path: Path) -> None:
    capsule.write_file("version", Path("/proc/version"))
    capsule.upload("/proc/version", "again")
    assert capsule.read_file("version") == capsule.read_file("again") != b""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"through a pipe",))
    writer.start()
    capsule.upload(tmp_path / "pipe")
    writer.join(10)
    assert capsule.read_file("pipe") == b"through a pipe"


def test_modes_of_any_kind_are_kept(capsule: Capsule) -> None:
    for mode in (0o644, 0o600, 0o777, 0o40, 0o4):
        capsule.write_file(f"f{mode}", "x", mode=mode)
        assert capsule.stat(f"f{mode}").mode & 0o777 == mode


def test_mode_append_and_missing_folders(capsule: Capsule) -> None:
    capsule.write_file("deep/er/run.sh", "echo one", mode=0o755)
    capsule.write_file("deep/er/run.sh", "; echo two", append=True)
    assert capsule.exec("sh deep/er/run.sh").stdout == "one\ntwo\n"
    assert capsule.stat("deep/er/run.sh").mode & 0o777 == 0o755


def test_folders_are_listed_made_moved_and_removed(capsule: Capsule) -> None:
    capsule.mkdir("a/b")
    capsule.write_file("a/b/f", "x")
    capsule.exec("ln -s b a/link")
    entries = {entry.name: entry for entry in capsule.list_dir("a")}
    assert (entries["b"].is_dir, entries["link"].type, entries["link"].target) == (
        True,
        "symlink",
        "b",
    )
    assert "/workspace/a/b/f" in [e.path for e in capsule.list_dir("a", recursive=True)]
    capsule.move("a/b/f", "g")
    assert capsule.exists("g")
    assert not capsule.exists("a/b/f")
    with pytest.raises(ConflictError):
        capsule.remove("a")
    capsule.remove("a", recursive=True)
    assert [entry.name for entry in capsule.list_dir()] == ["g"]


def test_stat_follows_links_only_when_told(capsule: Capsule) -> None:
    capsule.write_file("file", "12345")
    capsule.exec("ln -s file link")
    assert capsule.stat("link").type == "symlink"
    assert (capsule.stat("link", follow=True).type, capsule.stat("link", follow=True).size) == (
        "file",
        5,
    )


def test_what_cannot_be_read_says_why(capsule: Capsule) -> None:
    with pytest.raises(NotFoundError, match="nothing"):
        capsule.read_file("nothing")
    with pytest.raises(InvalidError):
        capsule.read_file("/workspace")
    with pytest.raises(InvalidError):
        capsule.read_file("../../etc/shadow")
    with pytest.raises((ForbiddenError, InvalidError, NotFoundError)):
        capsule.write_file("/usr/bin/evil", "x")


def test_a_sandbox_that_is_gone_has_no_say_about_files(client: CapsuleClient) -> None:
    capsule = client.create("python")
    capsule.delete()
    with pytest.raises((GoneError, NotFoundError)):
        capsule.exists("anything")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "project"
    (source / "pkg" / "deep").mkdir(parents=True)
    (source / "pkg" / "deep" / "data.bin").write_bytes(os.urandom(700_000))
    (source / "pkg" / "mod.py").write_text("VALUE = 42\n")
    (source / "main.py").write_text("from pkg.mod import VALUE; print(VALUE)")
    (source / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (source / "tool.sh").chmod(0o755)
    (source / "link").symlink_to("main.py")
    (source / "empty").mkdir()
    return source


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_folder_goes_up_and_comes_down_again(
    capsule: Capsule, folder: Path, tmp_path: Path
) -> None:
    seen: list[int] = []
    up = capsule.upload(folder, progress=seen.append)
    assert up.files == 4
    assert sum(seen) > 700_000
    assert capsule.exec("python3 -B project/main.py && ./project/tool.sh").stdout == "42\ntool\n"
    down = capsule.download("/workspace/project", tmp_path / "copy")
    assert digest(tmp_path / "copy") == digest(folder)
    assert (tmp_path / "copy" / "link").is_symlink()
    assert (tmp_path / "copy" / "empty").is_dir()
    assert os.access(tmp_path / "copy" / "tool.sh", os.X_OK)
    assert down.files == 4


def test_one_file_goes_up_and_comes_down_again(capsule: Capsule, tmp_path: Path) -> None:
    source = tmp_path / "one.bin"
    source.write_bytes(os.urandom(2 * MIB))
    moved = capsule.upload(source, "/workspace/sub/two.bin")
    assert (moved.files, moved.bytes) == (1, 2 * MIB)
    capsule.download("/workspace/sub/two.bin", tmp_path / "three.bin")
    assert (tmp_path / "three.bin").read_bytes() == source.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.bin", "three.bin"]


def test_a_planted_link_does_not_lead_out_of_the_download(capsule: Capsule, tmp_path: Path) -> None:
    capsule.exec(
        "mkdir d && ln -s /etc d/etc && ln -s ../../.. d/up && ln -s f d/fine && echo x > d/f"
    )
    moved = capsule.download("d", tmp_path / "copy")
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == ["f", "fine"]
    assert len(moved.skipped) == 2


def test_a_download_goes_into_a_pipe_and_through_a_link(capsule: Capsule, tmp_path: Path) -> None:
    capsule.write_file("f", "new")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert capsule.download("f", tmp_path / "pipe").bytes == 3
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    capsule.download("f", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


def test_a_downloaded_program_can_be_run(capsule: Capsule, tmp_path: Path) -> None:
    capsule.write_file("run.sh", "echo hi", mode=0o755)
    capsule.write_file("data", "hi")
    capsule.download("run.sh", tmp_path / "run.sh")
    capsule.download("data", tmp_path / "data")
    assert os.access(tmp_path / "run.sh", os.X_OK)
    assert not (tmp_path / "data").stat().st_mode & 0o111


def test_a_name_may_be_as_long_as_the_disk_allows(capsule: Capsule, tmp_path: Path) -> None:
    capsule.write_file("f", "x")
    capsule.download("f", tmp_path / ("n" * 255))
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]


def test_a_download_is_not_written_through_a_planted_link(capsule: Capsule, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".f.partial").symlink_to("victim")
    capsule.write_file("f", "new")
    capsule.download("f", tmp_path / "f")
    assert ((tmp_path / "victim").read_text(), (tmp_path / "f").read_text()) == ("mine", "new")


def test_what_an_upload_leaves_out_is_told(capsule: Capsule, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").write_text("x")
    os.mkfifo(tmp_path / "d" / "pipe")
    moved = capsule.upload(tmp_path / "d")
    assert (moved.files, moved.skipped) == (1, ("pipe: neither file, folder nor symlink",))


def test_a_listing_that_is_not_whole_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsule_sdk._files.MOST_ENTRIES", 1)
    entry = {"name": "f", "path": "/workspace/f", "type": "file", "size": 0, "mode": 0, "mtime": 0}
    cut, whole = ({"entries": [entry], "truncated": truncated} for truncated in (True, False))
    with crooked_server(result(SANDBOX), answer(cut), answer(whole)) as server:
        capsule = CapsuleClient(server.url).get("x")
        with pytest.raises(TooLargeError, match="/workspace has more than 1 entries"):
            capsule.list_dir()
        assert [found.name for found in capsule.list_dir()] == ["f"]


def test_reading_is_repeated_and_appending_is_not() -> None:
    done = {"path": "/workspace/f", "size": 1}
    deeds = (result(SANDBOX), hang_up, answer(b"content"), hang_up, answer(done), hang_up)
    with crooked_server(*deeds) as server:
        capsule = CapsuleClient(server.url).get("x")
        assert capsule.read_file("f") == b"content"
        assert capsule.write_file("f", b"x").size == 1
        with pytest.raises(UnavailableError):
            capsule.write_file("f", b"x", append=True)
        assert len(server.requests) == len(deeds)


def test_a_failed_download_leaves_nothing(capsule: Capsule, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        capsule.download("nothing", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_changes_are_seen_as_they_happen(capsule: Capsule) -> None:
    seen: list[Change] = []
    watching = threading.Event()

    def watch() -> None:
        for change in capsule.watch(recursive=True):
            seen.append(change)
            watching.set()
            if change.path.endswith("last"):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    wait_for(lambda: capsule.write_file("probe", "") and watching.is_set(), what="a first change")
    capsule.write_file("last", "")
    thread.join(10)
    assert {change.change for change in seen} & {"create", "write", "rename"}
