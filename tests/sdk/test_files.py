"""Files through the client: contents, folders, uploads, downloads, changes."""

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
    Capsule,
    CapsuleClient,
    Change,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from tests.sdk.crooked import answer, crooked_server, hang_up, result
from tests.sdk.test_rpc import SANDBOX
from tests.support import wait_for

MIB = 1024 * 1024


@pytest.mark.parametrize("size", [0, 18 * 1024, 256 * 1024 + 1, 3 * MIB])
def test_content_of_any_size_comes_back_as_it_was(capsule: Capsule, size: int) -> None:
    content = os.urandom(size)
    written = capsule.write_file("/workspace/data", content)
    assert (written.path, written.size) == ("/workspace/data", size)
    assert capsule.read_file("/workspace/data") == content
    assert b"".join(capsule.read_stream("/workspace/data")) == content


def chunks() -> Iterator[bytes]:
    yield b"one "
    yield b""
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
    wrong: list[Any] = [iter([b"one", "text"]), iter([b"one", None])]
    with local.open() as text:
        for each in (*wrong, text):
            with pytest.raises(InvalidError):
                capsule.write_file("x", each)


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
    link = entries["link"]
    assert (entries["b"].is_dir, link.type, link.target) == (True, "symlink", "b")
    assert capsule.stat("a/link").type == "symlink"
    assert capsule.stat("a/link", follow=True).is_dir
    assert "/workspace/a/b/f" in [e.path for e in capsule.list_dir("a", recursive=True)]
    capsule.move("a/b/f", "g")
    assert capsule.exists("g")
    assert not capsule.exists("a/b/f")
    with pytest.raises(ConflictError):
        capsule.remove("a")
    capsule.remove("a", recursive=True)
    assert [entry.name for entry in capsule.list_dir()] == ["g"]


def test_what_cannot_be_read_says_why(capsule: Capsule, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing"):
        capsule.read_file("nothing")
    with pytest.raises(InvalidError):
        capsule.read_file("/workspace")
    with pytest.raises(InvalidError):
        capsule.read_file("../../etc/shadow")
    with pytest.raises((ForbiddenError, InvalidError, NotFoundError)):
        capsule.write_file("/usr/bin/evil", "x")
    with pytest.raises(NotFoundError):
        capsule.download("nothing", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


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


def test_a_truncated_listing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
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
