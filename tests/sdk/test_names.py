"""Names that are not UTF-8: any byte but / and NUL may be in one, and every method reaches it."""

from __future__ import annotations

import os
import threading
from pathlib import Path, PurePosixPath

import pytest

from capsule_sdk import AsyncCapsule, Capsule, InvalidError, NotFoundError

ODD = b"a\xffb"
TEXT = "a\ufffdb"  # how people see it


@pytest.fixture
def odd(capsule: Capsule) -> Capsule:
    """Folders whose names look the same as text, and are not."""
    capsule.run(
        "import os\n"
        "for name in (b'a\\xffb', b'a\\xfeb', 'a\\ufffdb'.encode()):\n"
        "    os.makedirs(b'd/' + name + b'/deep')\n"
        "    open(b'd/' + name + b'/deep/f', 'wb').write(name)\n"
        "open(b'd/a\\xfff', 'w').close()\n"
    ).check()
    return capsule


def test_a_file_from_birth_to_end(capsule: Capsule) -> None:
    assert capsule.write_file(ODD, b"one").size == 3
    assert capsule.exec("printf %s * | od -An -tx1").stdout.split() == ["61", "ff", "62"]
    assert capsule.read_file(ODD) == b"one"
    assert capsule.read_file_text(b"/workspace/" + ODD) == "one"
    assert b"".join(capsule.read_stream(ODD)) == b"one"
    assert capsule.exists(ODD)
    assert not capsule.exists(b"a\xfeb")
    capsule.remove(ODD)
    assert capsule.list_dir() == []


def test_what_is_listed_can_be_asked_for(capsule: Capsule) -> None:
    capsule.write_file(ODD, b"one")
    (entry,) = capsule.list_dir()
    assert (entry.name, entry.path) == (TEXT, f"/workspace/{TEXT}")
    assert (entry.name_bytes, entry.path_bytes) == (ODD, b"/workspace/" + ODD)
    assert capsule.read_file(entry.path_bytes) == b"one"
    found = capsule.stat(entry.path_bytes)
    assert (found.name_bytes, found.path_bytes, found.size) == (ODD, b"/workspace/" + ODD, 3)


def test_names_that_are_text_are_the_same_in_bytes(capsule: Capsule) -> None:
    capsule.write_file("grüße", b"")
    (entry,) = capsule.list_dir(PurePosixPath("/workspace"))
    assert (entry.name, entry.name_bytes) == ("grüße", "grüße".encode())
    assert entry.path_bytes == b"/workspace/" + entry.name_bytes


def test_text_may_hold_what_the_file_system_gave(capsule: Capsule) -> None:
    for path in (os.fsdecode(ODD), PurePosixPath(os.fsdecode(ODD))):
        capsule.write_file(path, b"x")
        assert capsule.read_file(ODD) == b"x"
        capsule.remove(path)


def test_folders_that_look_the_same_are_told_apart(odd: Capsule) -> None:
    found = odd.list_dir("d", recursive=True)
    files = [entry for entry in found if entry.name == "f"]
    assert len(found) == 10
    assert sorted(odd.read_file(entry.path_bytes) for entry in files) == sorted(
        entry.path_bytes.split(b"/")[3] for entry in files
    )
    assert {entry.path_bytes for entry in odd.list_dir(b"d/a\xfeb")} == {
        b"/workspace/d/a\xfeb/deep"
    }


def test_folders_are_made_and_removed(capsule: Capsule) -> None:
    capsule.mkdir(ODD + b"/deep")
    assert capsule.stat(ODD + b"/deep").is_dir
    capsule.remove(ODD, recursive=True)
    assert not capsule.exists(ODD)


def test_a_folder_with_such_names_goes_both_ways(capsule: Capsule, tmp_path: Path) -> None:
    source = os.fsencode(tmp_path) + b"/up"
    os.makedirs(source + b"/\xfe")
    for name in (ODD, b"\xfe/" + ODD, b"\xfe/" + b"\xff" * 200):
        with open(source + b"/" + name, "wb") as file:
            file.write(name)
    os.symlink(ODD, source + b"/link\xff")
    assert capsule.upload(tmp_path / "up", "up").files == 3
    assert capsule.read_file(b"up/\xfe/" + ODD) == b"\xfe/" + ODD
    assert capsule.download("up", tmp_path / "down").skipped == ()
    target = os.fsencode(tmp_path) + b"/down"
    assert sorted(os.listdir(target)) == sorted(os.listdir(source))
    assert sorted(os.listdir(target + b"/\xfe")) == sorted(os.listdir(source + b"/\xfe"))
    assert os.readlink(target + b"/link\xff") == ODD


def test_one_such_file_goes_both_ways(capsule: Capsule, tmp_path: Path) -> None:
    local = tmp_path / os.fsdecode(ODD)
    local.write_bytes(b"content")
    capsule.upload(local)
    assert [entry.name_bytes for entry in capsule.list_dir()] == [ODD]
    capsule.download(ODD, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"content"


async def test_the_async_one_does_the_same(async_capsule: AsyncCapsule) -> None:
    await async_capsule.write_file(ODD, b"x" * 300_000)
    (entry,) = await async_capsule.list_dir()
    assert entry.name_bytes == ODD
    assert len(await async_capsule.read_file(ODD)) == 300_000
    assert sum([len(chunk) async for chunk in async_capsule.read_stream(ODD)]) == 300_000
    await async_capsule.remove(ODD)


@pytest.mark.parametrize("path", ["", b"", None, 3, "a\ud800", ["a"]])
def test_what_is_no_path_is_refused_by_name(capsule: Capsule, path: object) -> None:
    with pytest.raises(InvalidError, match=r"^path=") as caught:
        capsule.read_file(path)  # type: ignore[arg-type]
    assert caught.value.details["field"] == "path"
    with pytest.raises(InvalidError, match=r"^path="):
        capsule.list_dir(path)  # type: ignore[arg-type]


def test_what_the_server_refuses_names_the_path_as_it_was_given(capsule: Capsule) -> None:
    with pytest.raises(InvalidError, match=r"^path=b'\.\./x' has a '\.\.' component"):
        capsule.read_file(b"../x")
    with pytest.raises(InvalidError, match=r"^target='x/\.\./\.\./y' has"):
        capsule.move("x", "x/../../y")
    with pytest.raises(NotFoundError):
        capsule.stat(ODD)


def test_such_a_folder_is_moved_transferred_and_watched(capsule: Capsule, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/file").write_text("content")
    capsule.mkdir("plain")
    capsule.move("plain", ODD)
    assert [entry.name_bytes for entry in capsule.list_dir()] == [ODD]
    capsule.upload(tmp_path / "d", ODD)
    capsule.download(ODD, tmp_path / "copy")
    assert (tmp_path / "copy/file").read_text() == "content"
    changes = capsule.watch(ODD)
    writer = threading.Timer(0.5, capsule.mkdir, (ODD + b"/new",))
    writer.start()
    assert next(changes).path.endswith("new")
    writer.join()
    changes.close()
    capsule.move(ODD, "plain")
    assert [entry.name for entry in capsule.list_dir()] == ["plain"]


def test_the_root_can_be_listed(capsule: Capsule) -> None:
    entries = {entry.name: entry for entry in capsule.list_dir("/")}
    assert entries["workspace"].path_bytes == b"/workspace"
