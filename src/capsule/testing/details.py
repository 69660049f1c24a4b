"""Conformance: what is told of files beyond their stat, and attributes as their metadata."""

from __future__ import annotations

import pytest

from capsule.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    NotSupportedError,
    TooLargeError,
)
from capsule.model import Detail
from capsule.testing.harness import Subject

MARKED = Detail("user.test.")


class TestDetail:
    async def test_owners_have_names(self, subject: Subject) -> None:
        await subject.link.write("named", b"x")
        found = await subject.link.stat("named", detail=Detail())
        inside = await subject.sh("id -un; id -gn")
        if inside.exit.exit_code == 0 and subject.box.isolation != "landlock":
            assert [found.owner, found.group] == inside.stdout.decode().split()
        assert abs(found.mtime_ns / 1e9 - found.mtime) < 1e-3
        plain = await subject.link.stat("named")
        assert (plain.owner, plain.mtime_ns, plain.metadata) == ("", 0, {})

    async def test_an_id_without_a_name_is_its_number(self, subject: Subject) -> None:
        found = await subject.link.stat("/proc/self", detail=Detail())
        assert found.owner and found.group

    async def test_a_link_is_followed_to_its_end(self, subject: Subject) -> None:
        await subject.link.write("deep/down/file", b"12345", mode=0o640)
        await subject.link.symlink("deep/second", "down/file")
        await subject.link.symlink("first", "deep/second")
        await subject.link.symlink("nowhere", "gone/file")
        found = await subject.link.stat("first", detail=Detail())
        assert (found.type, found.target) == ("symlink", "deep/second")
        assert found.resolved is not None
        assert found.resolved.path == f"{await subject.workspace()}/deep/down/file"
        assert (found.resolved.type, found.resolved.mode, found.resolved.size) == ("file", 0o640, 5)
        listed = (await subject.link.list(".", detail=Detail())).entries
        ends = {entry.name: entry.resolved for entry in listed if entry.type == "symlink"}
        assert ends["first"] == found.resolved and ends["nowhere"] is None

    async def test_a_listing_goes_as_deep_as_it_is_told(self, subject: Subject) -> None:
        await subject.link.write("tree/a/b/c/file", b"")
        for depth, wanted in ((1, ["a"]), (2, ["a", "a/b"]), (9, ["a", "a/b", "a/b/c"])):
            found = await subject.link.list("tree", recursive=True, depth=depth)
            paths = [entry.path for entry in found.entries if entry.type == "dir"]
            assert paths == wanted and not found.truncated

    async def test_a_folder_that_was_there_is_told_from_a_new_one(self, subject: Subject) -> None:
        assert await subject.link.mkdir("some/folder")
        assert not await subject.link.mkdir("some/folder")
        await subject.link.write("some/file", b"")
        with pytest.raises(ConflictError):
            await subject.link.mkdir("some/file")

    async def test_a_move_makes_folders_where_asked(self, subject: Subject) -> None:
        await subject.link.write("here", b"x")
        with pytest.raises(NotFoundError):
            await subject.link.move("here", "new/place/there")
        await subject.link.move("here", "new/place/there", parents=True)
        assert await subject.content("new/place/there") == b"x"
        with pytest.raises(NotFoundError):
            await subject.link.move("here", "other/place", parents=True)
        assert "other" not in await subject.entries()


class TestMetadata:
    async def test_metadata_is_kept_with_a_file(self, subject: Subject) -> None:
        await need_attributes(subject)
        kept = {"kind": "note", "ünï": "→", "empty": ""}
        made = await subject.link.write("kept", b"x", metadata=kept, detail=MARKED)
        assert made.metadata == kept
        assert (await subject.link.stat("kept", detail=MARKED)).metadata == kept
        (listed,) = [
            entry
            for entry in (await subject.link.list(".", detail=MARKED)).entries
            if entry.name == "kept"
        ]
        assert listed.metadata == kept
        assert (await subject.link.stat("kept", detail=Detail("user.other."))).metadata == {}

    async def test_new_metadata_takes_the_place_of_the_old(self, subject: Subject) -> None:
        await need_attributes(subject)
        await subject.link.write("changed", b"x", metadata={"a": "1", "b": "2"}, detail=MARKED)
        for append in (True, False):
            await subject.link.write(
                "changed", b"y", metadata={"c": "3"}, detail=MARKED, append=append
            )
            found = await subject.link.stat("changed", detail=MARKED)
            assert found.metadata == {"c": "3"}
        await subject.link.write("changed", b"z", detail=MARKED)
        assert (await subject.link.stat("changed", detail=MARKED)).metadata == {}

    async def test_a_name_that_is_too_long_leaves_no_file(self, subject: Subject) -> None:
        await need_attributes(subject)
        with pytest.raises(TooLargeError):
            await subject.link.write("long", b"x", metadata={"n" * 300: ""}, detail=MARKED)
        assert "long" not in await subject.entries()

    async def test_files_without_metadata_have_none(self, subject: Subject) -> None:
        await subject.sh("echo x > bare; mkfifo pipe; ln -s bare link")
        listed = (await subject.link.list(".", detail=MARKED)).entries
        found = {entry.name: dict(entry.metadata) for entry in listed}
        assert (found["bare"], found["pipe"], found["link"]) == ({}, {}, {})


async def need_attributes(subject: Subject) -> None:
    """Skip where the box's file system has none, or its level lets nobody change them."""
    try:
        await subject.link.write("probe", b"", metadata={"a": "1"}, detail=MARKED)
    except (NotSupportedError, ForbiddenError) as exc:
        pytest.skip(exc.message)
