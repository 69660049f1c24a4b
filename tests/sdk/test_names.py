"""Names of files that are not UTF-8: every method takes them as bytes."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from capsule_sdk import Capsule, InvalidError

ODD = b"a\xffb"
TEXT = "a\ufffdb"


def test_a_file_is_written_read_and_removed(capsule: Capsule) -> None:
    assert capsule.write_file(ODD, b"one").size == 3
    assert capsule.exec("printf %s * | od -An -tx1").stdout.split() == ["61", "ff", "62"]
    assert capsule.read_file(ODD) == b"one"
    assert capsule.read_file_text(b"/workspace/" + ODD) == "one"
    assert b"".join(capsule.read_stream(ODD)) == b"one"
    assert capsule.exists(ODD)
    assert not capsule.exists(b"a\xfeb")
    capsule.remove(ODD)
    assert capsule.list_dir() == []


def test_an_entry_has_its_name_as_text_and_bytes(capsule: Capsule) -> None:
    capsule.write_file(ODD, b"one")
    (entry,) = capsule.list_dir()
    assert (entry.name, entry.path) == (TEXT, f"/workspace/{TEXT}")
    assert (entry.name_bytes, entry.path_bytes) == (ODD, b"/workspace/" + ODD)
    assert capsule.read_file(entry.path_bytes) == b"one"
    found = capsule.stat(entry.path_bytes)
    assert (found.name_bytes, found.path_bytes, found.size) == (ODD, b"/workspace/" + ODD, 3)
    assert capsule.read_file(os.fsdecode(ODD)) == b"one"
    capsule.move(ODD, "grüße")
    (entry,) = capsule.list_dir(PurePosixPath("/workspace"))
    assert (entry.name, entry.name_bytes) == ("grüße", "grüße".encode())


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


@pytest.mark.parametrize("path", ["", b"", None, 3, "a\ud800", ["a"]])
def test_a_wrong_path_is_refused(capsule: Capsule, path: object) -> None:
    with pytest.raises(InvalidError, match=r"^path=") as caught:
        capsule.read_file(path)  # type: ignore[arg-type]
    assert caught.value.details["field"] == "path"
