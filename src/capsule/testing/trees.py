"""Conformance: directories, links, and what changes below them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from capsule.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    TooLargeError,
)
from capsule.link import Change
from capsule.model import MIB
from capsule.testing.harness import Launcher, Subject, fail


class TestListing:
    async def test_an_empty_directory_has_no_entries(self, subject: Subject) -> None:
        await subject.link.mkdir("dir")
        assert await subject.link.list("dir") == ([], False)

    async def test_entries_say_what_they_are(self, subject: Subject) -> None:
        await subject.sh(
            "echo 12345 > file; mkdir dir; ln -s file link; mkfifo pipe; chmod 750 dir"
        )
        entries = await subject.entries()
        assert {name: entry.type for name, entry in entries.items()} == {
            "file": "file",
            "dir": "dir",
            "link": "symlink",
            "pipe": "fifo",
        }
        assert entries["file"].size == 6
        assert (entries["link"].target, entries["file"].target) == ("file", None)
        assert all(entry.name == name for name, entry in entries.items())

    async def test_a_listing_goes_as_deep_as_asked(self, subject: Subject) -> None:
        await subject.sh("mkdir -p a/b/c/d; touch a/b/c/d/e")
        for depth, deepest in ((1, "a"), (2, "a/b"), (3, "a/b/c")):
            found = await subject.entries(recursive=True, depth=depth)
            assert max(found, key=len) == deepest

    async def test_a_recursive_listing_has_paths(self, subject: Subject) -> None:
        await subject.sh("mkdir -p a/b/c; echo > a/x; echo > a/b/y; ln -s .. a/b/c/loop")
        entries = await subject.entries(recursive=True)
        assert set(entries) == {"a", "a/x", "a/b", "a/b/y", "a/b/c", "a/b/c/loop"}
        assert entries["a/b/y"].name == "y"
        assert set(await subject.entries("a", recursive=True)) == {
            "x", "b", "b/y", "b/c", "b/c/loop"
        }  # fmt: skip

    async def test_ten_thousand_entries(self, launch: Launcher) -> None:
        subject = await launch(inodes=20_000)
        await subject.sh("mkdir many; cd many; seq 10000 | xargs touch")
        entries, truncated = await subject.link.list("many")
        assert not truncated
        assert {entry.name for entry in entries} == {str(n) for n in range(1, 10_001)}
        entries, truncated = await subject.link.list("many", limit=100)
        assert (len(entries), truncated) == (100, True)
        await subject.link.remove("many", recursive=True)
        assert not await subject.exists("many")

    async def test_exactly_the_limit_is_not_truncated(self, subject: Subject) -> None:
        await subject.sh("touch 1 2 3")
        assert (await subject.link.list(".", limit=3)).truncated is False
        assert (await subject.link.list(".", limit=2)).truncated is True

    async def test_what_cannot_be_listed_says_why(self, subject: Subject) -> None:
        await subject.need_chmod()
        await subject.sh("touch file; mkdir closed; chmod 0 closed")
        with pytest.raises(NotFoundError):
            await subject.link.list("nosuch")
        with pytest.raises(InvalidError):
            await subject.link.list("file")
        with pytest.raises(ForbiddenError):
            await subject.link.list("closed")

    async def test_a_closed_directory_does_not_hide_its_neighbours(self, subject: Subject) -> None:
        await subject.need_chmod()
        await subject.sh("mkdir -p a/closed b; touch a/closed/x b/y; chmod 0 a/closed")
        entries, _ = await subject.link.list(".", recursive=True)
        assert {entry.path for entry in entries} == {"a", "a/closed", "b", "b/y"}


class TestTrees:
    async def test_stat_tells_link_from_target(self, subject: Subject) -> None:
        await subject.link.write("file", b"12345")
        await subject.link.symlink("link", "file")
        assert (await subject.link.stat("link")).type == "symlink"
        assert (await subject.link.stat("link")).target == "file"
        followed = await subject.link.stat("link", follow=True)
        assert (followed.type, followed.size) == ("file", 5)
        with pytest.raises(NotFoundError):
            await subject.link.stat("nosuch")

    @pytest.mark.parametrize("path", ["/", ".", "/workspace", "/workspace/", "/dev/null", "/usr"])
    async def test_well_known_places_can_be_looked_at(self, subject: Subject, path: str) -> None:
        stat = await subject.link.stat(path)
        assert stat.type == ("device" if path == "/dev/null" else "dir")

    async def test_directories_are_made(self, subject: Subject) -> None:
        link = subject.link
        await link.mkdir("a/b/c", mode=0o700)
        assert (await link.stat("a/b/c")).mode & 0o777 == 0o700
        await link.mkdir("a/b/c")
        with pytest.raises(ConflictError):
            await link.mkdir("a/b/c", parents=False)
        with pytest.raises(NotFoundError):
            await link.mkdir("x/y", parents=False)
        await link.write("file", b"")
        with pytest.raises((ConflictError, InvalidError)):
            await link.mkdir("file")
        with pytest.raises((ConflictError, InvalidError)):
            await link.mkdir("file/below")

    async def test_files_and_directories_are_moved(self, subject: Subject) -> None:
        link = subject.link
        await link.write("a/file", b"x")
        await link.move("a", "b")
        await link.move("b/file", "file")
        assert await subject.content("file") == b"x"
        await link.write("other", b"y")
        with pytest.raises(ConflictError):
            await link.move("file", "other", overwrite=False)
        await link.move("file", "other")
        assert await subject.content("other") == b"x"
        with pytest.raises(NotFoundError):
            await link.move("nosuch", "x")
        with pytest.raises(NotFoundError):
            await link.move("other", "no/such/place")

    async def test_a_directory_with_something_in_it_is_not_replaced(self, subject: Subject) -> None:
        await subject.sh("mkdir a; mkdir b; touch b/x")
        with pytest.raises(ConflictError):
            await subject.link.move("a", "b")
        with pytest.raises(InvalidError):
            await subject.link.move("a", "a/below")

    async def test_a_tree_moves_between_any_two_folders(self, subject: Subject) -> None:
        """Also where these are two mounts: it arrives whole, as it was, and is gone from here."""
        look = "find . -exec stat -c '%n %F %s %a %Y %N' {} + | sort; cat a/b/file a/hole | sha1sum"
        await subject.sh(
            "mkdir -p tree/a/b tree/empty; cd tree; echo content > a/b/file; truncate -s 3M a/hole;"
            " printf x | dd of=a/hole bs=1 seek=2M conv=notrunc; ln -s b/file a/link;"
            " ln -s nowhere a/lost; mkfifo a/pipe; touch 'a/new\nline'"
        )
        await subject.sh(
            "cd tree; touch -d 2001-02-03T04:05:06 a/b/file a/b .; touch -hd 2002-01-01 a/link;"
            " chmod 640 a/b/file; chmod 711 a/b; chmod 500 empty"
        )
        before = await subject.output(look, cwd="/workspace/tree")
        assert "file" in before
        await subject.link.move("tree", "/tmp/moved")
        assert await subject.entries() == {}
        assert await subject.output(look, cwd="/tmp/moved") == before
        await subject.link.move("/tmp/moved", "/workspace/back")
        assert await subject.output(look, cwd="/workspace/back") == before
        assert await subject.entries("/tmp") == {}

    async def test_a_file_and_a_link_move_between_any_two_folders(self, subject: Subject) -> None:
        link = subject.link
        await link.write("file", b"new", mode=0o750)
        await link.symlink("link", "file")
        await link.write("/tmp/file", b"old")
        with pytest.raises(ConflictError):
            await link.move("file", "/tmp/file", overwrite=False)
        assert await subject.content("/tmp/file") == b"old"
        for name in ("file", "link"):
            await link.move(name, f"/tmp/{name}")
        assert await subject.content("/tmp/link") == b"new"
        assert (await link.stat("/tmp/file")).mode & 0o777 == 0o750
        assert await subject.entries() == {}
        assert set(await subject.entries("/tmp")) == {"file", "link"}

    async def test_a_refused_move_leaves_both_sides_as_they_were(self, subject: Subject) -> None:
        for folder in ("a/b", "/tmp/full/x"):
            await subject.link.mkdir(folder)
        for file in ("file", "/tmp/file"):
            await subject.link.write(file, b"")
        for source, target, error in (
            ("nosuch", "/tmp/x", NotFoundError),
            ("a", "/tmp/no/such", NotFoundError),
            ("a", "/tmp/full", ConflictError),
            ("a", "/tmp/file", InvalidError),
            ("file", "/tmp/full", InvalidError),
            ("a", "/usr/a", ForbiddenError),
            ("/usr/bin/env", "env", ForbiddenError),
        ):
            with pytest.raises(error):
                await subject.link.move(source, target)
        assert set(await subject.entries(recursive=True)) == {"a", "a/b", "file"}
        assert set(await subject.entries("/tmp", recursive=True)) == {"full", "full/x", "file"}

    async def test_what_cannot_be_moved_as_a_whole_is_not_moved(self, launch: Launcher) -> None:
        """Too deep, unreadable or too large for a copy; where none is needed it is no matter."""
        subject = await launch(disk=32 * MIB)
        code = "import os\nfor _ in range(200): os.mkdir('d'); os.chdir('d')\nopen('x', 'w')"
        await subject.sh(
            f'mkdir large deep closed; python3 -c "{code}"; mv d deep; touch closed/x;'
            " head -c 25000000 /dev/urandom > large/file; chmod 0 closed/x"
        )
        for name in ("large", "deep", "closed"):
            count = f"find {name} | wc -l; stat -c %s {name}/* 2>/dev/null"
            before = await subject.output(count)
            try:
                await subject.link.move(name, f"/tmp/{name}")
            except (NoSpaceError, TooLargeError, ForbiddenError):
                assert await subject.entries("/tmp") == {}
            else:
                await subject.link.move(f"/tmp/{name}", name)
            assert await subject.output(count) == before

    async def test_removing_needs_a_word_for_whole_trees(self, subject: Subject) -> None:
        await subject.sh("mkdir -p tree/a/b; touch tree/x tree/a/y empty; mkdir bare")
        link = subject.link
        with pytest.raises(ConflictError) as raised:
            await link.remove("tree")
        assert raised.value.hint is not None and "recursive" in raised.value.hint
        await link.remove("tree", recursive=True)
        await link.remove("bare")
        await link.remove("empty", recursive=True)
        assert await subject.entries() == {}
        with pytest.raises(NotFoundError):
            await link.remove("tree", recursive=True)

    async def test_a_tree_of_any_depth_is_removed(self, subject: Subject) -> None:
        code = (
            "import os\n"
            "for _ in range(3000):\n"
            "    os.mkdir('deep'); os.chdir('deep')\n"
            "open('bottom', 'w')\n"
        )
        assert (await subject.python(code)).exit.exit_code == 0
        listing = await subject.link.list(".", recursive=True)
        assert listing.entries and listing.truncated
        await subject.link.remove("deep", recursive=True)
        assert await subject.entries() == {}

    async def test_a_closed_tree_of_ones_own_is_removed(self, subject: Subject) -> None:
        await subject.need_chmod()
        await subject.sh(
            "mkdir -p tree/closed/inner; touch tree/closed/inner/x; chmod 0 tree/closed"
        )
        try:
            await subject.link.remove("tree", recursive=True)
        except ForbiddenError:
            await subject.sh("chmod 700 tree/closed")
            await subject.link.remove("tree", recursive=True)
        assert await subject.entries() == {}

    async def test_modes_are_changed(self, subject: Subject) -> None:
        await subject.need_chmod()
        await subject.link.write("file", b"#!/bin/sh\necho ran")
        await subject.link.chmod("file", 0o755)
        assert await subject.output("./file") == "ran"
        with pytest.raises(NotFoundError):
            await subject.link.chmod("nosuch", 0o644)
        with pytest.raises(ForbiddenError):
            await subject.link.chmod("/usr", 0o777)


class TestLinks:
    async def test_files_are_read_and_written_through_links(self, subject: Subject) -> None:
        await subject.link.write("dir/file", b"old")
        await subject.link.symlink("link", "dir/file")
        await subject.link.symlink("way", "dir")
        assert await subject.content("link") == await subject.content("way/file") == b"old"
        await subject.link.write("link", b"new")
        assert await subject.content("dir/file") == b"new"
        assert (await subject.link.stat("link")).type == "symlink"
        await subject.link.write("way/other", b"x")
        assert await subject.content("dir/other") == b"x"

    async def test_a_file_is_made_at_the_end_of_its_links(self, subject: Subject) -> None:
        link = subject.link
        await link.mkdir("dir")
        await link.symlink("dir/second", "../made")
        await link.symlink("first", "dir/second")
        for append in (False, True):
            await link.write("first", b"new", append=append)
            assert await subject.content("made") == b"new"
            assert (await link.stat("first")).type == "symlink"
            await link.remove("made")
        await link.symlink("astray", "no/such/folder")
        with pytest.raises(NotFoundError):
            await link.write("astray", b"x")
        with pytest.raises(ConflictError):
            await link.write("first", b"x", exclusive=True)
        assert set(await subject.entries()) == {"dir", "first", "astray"}

    async def test_a_link_to_nowhere_is_not_found(self, subject: Subject) -> None:
        await subject.link.symlink("link", "nosuch/place")
        with pytest.raises(NotFoundError):
            await subject.content("link")
        assert (await subject.link.stat("link")).type == "symlink"

    async def test_a_ring_of_links_is_invalid(self, subject: Subject) -> None:
        await subject.sh("ln -s a b; ln -s b a")
        with pytest.raises(InvalidError):
            await subject.content("a")
        with pytest.raises(InvalidError):
            await subject.link.write("a", b"x")

    async def test_removing_a_link_spares_its_target(self, subject: Subject) -> None:
        await subject.sh(
            "mkdir -p keep tree; touch keep/x; ln -s ../keep tree/link; ln -s keep top"
        )
        await subject.link.remove("tree", recursive=True)
        await subject.link.remove("top", recursive=True)
        assert set(await subject.entries(recursive=True)) == {"keep", "keep/x"}

    async def test_a_link_is_not_replaced_by_another(self, subject: Subject) -> None:
        await subject.link.symlink("link", "a")
        with pytest.raises(ConflictError):
            await subject.link.symlink("link", "b")

    async def test_links_out_of_the_workspace_stay_in_the_box(self, subject: Subject) -> None:
        """Whatever it says, it is what a program of the box would read there."""
        await subject.sh("ln -s /usr/bin/env outside")
        assert await subject.content("outside") == (await subject.sh("cat outside")).stdout
        with pytest.raises(ForbiddenError):
            await subject.link.write("outside", b"#!/bin/sh")


class TestWatch:
    async def test_each_kind_of_change_is_told(self, subject: Subject) -> None:
        await subject.need_watch()
        steps = {
            "touch file": Change("create", "file", False),
            "echo x > file": Change("write", "file", False),
            "touch -d 2001-01-01 file": Change("chmod", "file", False),
            "mv file moved": Change("rename", "moved", False, arrived=True),
            "rm moved": Change("remove", "moved", False),
            "mkdir sub": Change("create", "sub", True),
            "rmdir sub": Change("remove", "sub", True),
        }
        async with subject.link.watch(".") as changes:
            for script, expected in steps.items():
                await subject.sh(script)
                await self.seen(changes, expected)

    async def test_file_operations_are_changes_too(self, subject: Subject) -> None:
        await subject.need_watch()
        async with subject.link.watch("/workspace") as changes:
            await subject.link.write("caf\udce9\n", b"x")
            change = await self.seen(changes, path="caf\udce9\n")
            assert change.change in ("create", "rename")

    async def test_only_a_recursive_watch_sees_below(self, subject: Subject) -> None:
        await subject.need_watch()
        await subject.link.mkdir("sub")
        async with subject.link.watch(".") as flat, subject.link.watch(".", recursive=True) as deep:
            await subject.sh("touch sub/file; touch end")
            await self.seen(deep, Change("create", "sub/file", False))
            while (change := await self.next(flat)).path != "end":
                assert "/" not in change.path

    async def test_a_directory_made_later_is_watched_too(self, subject: Subject) -> None:
        await subject.need_watch()
        async with subject.link.watch(".", recursive=True) as changes:
            await subject.sh("mkdir -p new")
            await self.seen(changes, Change("create", "new", True))
            await subject.sh("touch new/file")
            await self.seen(changes, path="new/file")

    async def test_a_sync_comes_behind_all_that_happened(self, subject: Subject) -> None:
        await subject.need_watch()
        async with subject.link.watch(".") as changes:
            for _ in range(2):
                await subject.sh("for n in $(seq 200); do touch file-$n; done; mkdir end")
                await changes.sync()
                found = [await self.next(changes)]
                while found[-1].change != "sync":
                    found.append(await self.next(changes))
                assert Change("create", "file-200", False) in found
                assert found[-2] == Change("create", "end", True)
                await subject.sh("rm -r file-* end")

    async def test_what_is_not_there_cannot_be_watched(self, subject: Subject) -> None:
        await subject.need_watch()
        with pytest.raises(NotFoundError):
            async with subject.link.watch("nosuch"):
                pass

    async def test_leaving_ends_the_watcher(self, subject: Subject) -> None:
        await subject.need_watch()
        for _ in range(20):
            async with subject.link.watch(".", recursive=True):
                pass
        await subject.sh("touch file")
        assert await subject.output("echo alive") == "alive"

    async def next(self, changes: AsyncIterator[Change]) -> Change:
        async with asyncio.timeout(5):
            return await anext(changes)

    async def seen(
        self, changes: AsyncIterator[Change], wanted: Change | None = None, *, path: str = ""
    ) -> Change:
        """The wanted change, after any others."""
        before = []
        try:
            while True:
                change = await self.next(changes)
                if change == wanted or change.path == path:
                    return change
                before.append(change)
        except TimeoutError:
            fail(f"no {wanted or path!r}, but {before}")
