"""Conformance: reading and writing files, of any size and under any name."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator

import pytest

from capsule.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
)
from capsule.model import MIB
from capsule.testing.harness import Launcher, Subject, until

ODD_NAMES = [
    "new\nline",
    " spaces ",
    "-rf",
    "quo'te\"s\\",
    "tab\tbell\a",
    "*?[a]",
    "ünï→🐍",
    "e\u0301 is not é",
    "caf\udce9",
    "\udcff\udc80",
    "\udced\udca0\udc80",
    "n" * 255,
    "...",
    ".hidden",
]


async def pieces(count: int, size: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield number.to_bytes(4, "big") * (size // 4)


class TestReadAndWrite:
    @pytest.mark.parametrize("size", [0, 1, 4096, 262_144, 262_145, 2_000_000])
    async def test_what_was_written_is_read(self, subject: Subject, size: int) -> None:
        data = os.urandom(size)
        stat = await subject.link.write("file", data)
        assert (stat.name, stat.path, stat.type, stat.size) == ("file", "file", "file", size)
        assert await subject.content("file") == data

    async def test_programs_see_the_same_file(self, subject: Subject) -> None:
        await subject.link.write("/workspace/in", b"from outside\n")
        assert await subject.output("cat in; echo from inside > out") == "from outside"
        assert await subject.content("out") == b"from inside\n"

    async def test_a_file_belongs_to_the_programs_user(self, subject: Subject) -> None:
        stat = await subject.link.write("file", b"x")
        assert await subject.output("stat -c %u:%g file; id -u; id -g") == (
            f"{stat.uid}:{stat.gid}\n{stat.uid}\n{stat.gid}"
        )

    async def test_a_hundred_mebibytes_stream_through(self, subject: Subject) -> None:
        stat = await subject.link.write("big", pieces(400, 262_144))
        assert stat.size == 100 * MIB
        received = hashlib.sha256()
        async with subject.link.read("big") as reader:
            assert reader.size == 100 * MIB
            async for chunk in reader:
                received.update(chunk)
        expected = hashlib.sha256()
        async for piece in pieces(400, 262_144):
            expected.update(piece)
        assert received.hexdigest() == expected.hexdigest()

    async def test_a_part_of_a_file_can_be_read(self, subject: Subject) -> None:
        await subject.link.write("file", b"0123456789")
        assert await subject.content("file", offset=3) == b"3456789"
        assert await subject.content("file", offset=3, length=4) == b"3456"
        assert await subject.content("file", length=0) == b""
        assert await subject.content("file", offset=10) == b""
        assert await subject.content("file", offset=99, length=5) == b""

    async def test_reading_says_what_it_reads(self, subject: Subject) -> None:
        await subject.link.write("file", b"12345", mode=0o640)
        async with subject.link.read("file") as reader:
            assert (reader.size, reader.mode & 0o777) == (5, 0o640)
            assert reader.mtime == pytest.approx((await subject.link.stat("file")).mtime)

    async def test_a_hole_is_read_as_zeros(self, subject: Subject) -> None:
        await subject.sh("truncate -s 5000000 file")
        assert await subject.content("file") == bytes(5_000_000)

    @pytest.mark.parametrize("mode", [0o644, 0o600, 0o755, 0o444])
    async def test_the_mode_is_the_one_given(self, subject: Subject, mode: int) -> None:
        await subject.link.write("file", b"x", mode=mode)
        assert (await subject.link.stat("file")).mode & 0o7777 == mode

    async def test_a_file_can_be_replaced_appended_to_and_protected(self, subject: Subject) -> None:
        link = subject.link
        await link.write("file", b"a much longer first version")
        await link.write("file", b"second")
        await link.write("file", b" and more", append=True)
        assert await subject.content("file") == b"second and more"
        with pytest.raises(ConflictError):
            await link.write("file", b"third", exclusive=True)
        assert await subject.content("file") == b"second and more"
        await link.write("new", b"x", exclusive=True)
        await link.write("appended", b"x", append=True)
        with pytest.raises(ConflictError):
            await link.write("appended", b"y", append=True, exclusive=True)
        assert await subject.content("appended") == b"x"
        await link.write("both", b"x", append=True, exclusive=True)

    async def test_a_file_written_in_place_stays_the_same_file(self, subject: Subject) -> None:
        link = subject.link
        await link.write("file", b"a long first version", mode=0o755)
        await subject.sh("ln file other; ln -s file link")
        await link.write("link", b"second", mode=0o644, in_place=True)
        assert await subject.content("other") == b"second"
        assert (await link.stat("file")).mode & 0o777 == 0o755
        assert (await link.stat("link")).type == "symlink"
        await link.write("new/file", pieces(3, 300_000), in_place=True)
        assert len(await subject.content("new/file")) == 900_000
        with pytest.raises(InvalidError):
            await link.write("new", b"x", in_place=True)

    async def test_a_file_written_in_place_is_whole_or_as_it_was(self, subject: Subject) -> None:
        link = subject.link
        await link.write("there/file", b"as it was")

        async def half() -> AsyncIterator[bytes]:
            yield bytes(3_000_000)
            raise ValueError("the source broke")

        for name in ("file", "new"):
            with pytest.raises(ValueError, match="the source broke"):
                await link.write(f"there/{name}", half(), in_place=True)

        async def clean() -> bool:
            return [each.name for each in (await link.list("there")).entries] == ["file"]

        await until(clean, what="nothing beside the old file")
        assert await subject.content("there/file") == b"as it was"
        for size in (2_000_000, 1, 0, 700_000):
            await link.write("there/file", b"n" * size, in_place=True)
            assert await subject.content("there/file") == b"n" * size

    async def test_parents_are_made_if_wanted(self, subject: Subject) -> None:
        await subject.link.write("a/b/c", b"x")
        assert await subject.content("a/b/c") == b"x"
        with pytest.raises(NotFoundError):
            await subject.link.write("d/e", b"x", parents=False)
        assert not await subject.exists("d")

    async def test_no_file_is_not_found(self, subject: Subject) -> None:
        with pytest.raises(NotFoundError):
            await subject.content("nosuch")
        with pytest.raises(NotFoundError):
            await subject.content("no/such")

    async def test_a_directory_is_no_file(self, subject: Subject) -> None:
        await subject.link.mkdir("dir")
        with pytest.raises(InvalidError):
            await subject.content("dir")
        with pytest.raises(InvalidError):
            await subject.link.write("dir", b"x")
        with pytest.raises((InvalidError, NotFoundError)):
            await subject.link.write("dir/", b"x")

    async def test_a_file_is_no_directory(self, subject: Subject) -> None:
        await subject.link.write("file", b"x")
        with pytest.raises(InvalidError):
            await subject.content("file/below")
        with pytest.raises((InvalidError, ConflictError)):
            await subject.link.write("file/below", b"x")

    @pytest.mark.parametrize("path", ["", "a/../b", "..", "/..", "a\0b", "/workspace/../etc"])
    async def test_impossible_paths_are_invalid(self, subject: Subject, path: str) -> None:
        with pytest.raises(InvalidError):
            await subject.content(path)
        with pytest.raises(InvalidError):
            await subject.link.write(path, b"x")
        with pytest.raises(InvalidError):
            await subject.link.stat(path)

    @pytest.mark.parametrize("path", ["x" * 256, "x/" * 3000 + "y"])
    async def test_a_path_too_long_is_a_clear_refusal(self, subject: Subject, path: str) -> None:
        with pytest.raises(InvalidError):
            await subject.link.write(path, b"x", parents=False)


class TestAtomicity:
    async def test_a_client_that_leaves_leaves_no_trace(self, subject: Subject) -> None:
        await subject.link.write("file", b"old")

        async def half() -> AsyncIterator[bytes]:
            yield bytes(300_000)
            raise ZeroDivisionError

        for path in ("file", "new"):
            with pytest.raises(ZeroDivisionError):
                await subject.link.write(path, half())

        async def clean() -> bool:
            return list(await subject.entries()) == ["file"]

        await until(clean, what="nothing beside the old file")
        assert await subject.content("file") == b"old"

    async def test_a_reader_sees_the_old_or_the_new_never_half(self, subject: Subject) -> None:
        old, new = b"a" * 3_000_000, b"b" * 3_000_000
        await subject.link.write("file", old)
        for version in (new, old, new):
            _, seen = await asyncio.gather(
                subject.link.write("file", version), subject.content("file")
            )
            assert seen in (old, new)

    async def test_a_running_program_can_be_replaced(self, subject: Subject) -> None:
        await subject.sh("cp /bin/sleep program")
        async with await subject.start("./program", "1000"):
            await subject.link.write("program", b"#!/bin/sh\necho new", mode=0o755)
            assert await subject.output("./program") == "new"

    async def test_many_writers_of_one_file_all_succeed(self, subject: Subject) -> None:
        versions = [bytes([65 + n]) * 400_000 for n in range(8)]
        await asyncio.gather(*(subject.link.write("file", each) for each in versions))
        assert await subject.content("file") in versions
        assert list(await subject.entries()) == ["file"]


class TestOddFiles:
    """Nothing in a box's file system may hang or fool a file operation."""

    @pytest.mark.parametrize("kind", ["fifo", "socket"])
    async def test_pipes_and_sockets_are_refused_at_once(self, subject: Subject, kind: str) -> None:
        make = {
            "fifo": "import os; os.mkfifo('odd')",
            "socket": "import socket; socket.socket(socket.AF_UNIX).bind('odd')",
        }
        if (await subject.python(make[kind])).exit.exit_code:
            pytest.skip(f"programs cannot make a {kind} here")
        async with asyncio.timeout(5):
            with pytest.raises(InvalidError):
                await subject.content("odd")
            for append in (False, True):
                with pytest.raises(InvalidError):
                    await subject.link.write("odd", b"x", append=append)
        assert (await subject.link.stat("odd")).type == kind

    @pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/tty"])
    async def test_devices_are_refused(self, subject: Subject, device: str) -> None:
        async with asyncio.timeout(5):
            with pytest.raises((InvalidError, ForbiddenError)):
                await subject.content(device)
            with pytest.raises((InvalidError, ForbiddenError)):
                await subject.link.write(device, b"x", append=True)
            with pytest.raises((InvalidError, ForbiddenError)):
                await subject.link.write(device, b"x")
        assert await subject.output(f"[ -c {device} ] && echo still") == "still"

    @pytest.mark.parametrize("name", ODD_NAMES)
    async def test_any_name_will_do(self, subject: Subject, name: str) -> None:
        link = subject.link
        stat = await link.write(f"dir/{name}", b"content")
        assert stat.name == name
        assert [entry.name for entry in (await link.list("dir")).entries] == [name]
        code = "import os; print(os.listdir(b'dir')[0].hex())"
        seen = bytes.fromhex((await subject.python(code)).stdout.decode())
        assert seen == os.fsencode(name)
        assert await subject.content(f"dir/{name}") == b"content"
        await link.move(f"dir/{name}", f"dir/{name[:250]}.x"[:255])
        await link.remove("dir", recursive=True)
        assert await subject.entries() == {}

    async def test_without_permission_it_is_forbidden(self, subject: Subject) -> None:
        await subject.need_chmod()
        await subject.sh("echo x > secret; chmod 0 secret; mkdir closed; chmod 500 closed")
        with pytest.raises(ForbiddenError):
            await subject.content("secret")
        with pytest.raises(ForbiddenError):
            await subject.link.write("closed/file", b"x")
        with pytest.raises(ForbiddenError):
            await subject.link.write("closed/sub/file", b"x")

    @pytest.mark.parametrize("path", ["/usr/bin/sh", "/usr/new", "/etc/passwd", "/new", "/proc/x"])
    async def test_the_system_cannot_be_written(self, subject: Subject, path: str) -> None:
        with pytest.raises((ForbiddenError, NotFoundError)):
            await subject.link.write(path, b"x")


class TestFullDisk:
    async def test_a_full_disk_is_no_space_and_the_box_lives_on(self, launch: Launcher) -> None:
        subject = await launch(disk=16 * MIB, inodes=1024)
        subject.need("disk")
        await subject.link.write("keep", b"kept")
        with pytest.raises(NoSpaceError) as raised:
            await subject.link.write("big", pieces(200, 262_144))
        assert raised.value.hint
        with pytest.raises(NoSpaceError):
            await subject.link.write("big", bytes(40 * MIB), append=True)
        assert await subject.content("keep") == b"kept"
        assert await subject.output("echo alive") == "alive"
        await subject.link.remove("big")
        await subject.link.write("small", b"fits again")
        assert set(await subject.entries()) == {"keep", "small"}

    async def test_a_program_sees_the_full_disk(self, launch: Launcher) -> None:
        subject = await launch(disk=16 * MIB, inodes=1024)
        subject.need("disk")
        result = await subject.sh("for n in 1 2 3; do head -c 10000000 /dev/zero > $n; done")
        assert result.exit.exit_code != 0 and b"No space left" in result.stderr
        assert sum(entry.size for entry in (await subject.entries()).values()) < 17 * MIB

    async def test_files_can_run_out_too(self, launch: Launcher) -> None:
        subject = await launch(disk=64 * MIB, inodes=600)
        subject.need("inodes")
        result = await subject.sh("mkdir many; cd many; seq 5000 | xargs touch")
        assert result.exit.exit_code != 0 and b"No space left" in result.stderr
        with pytest.raises(NoSpaceError):
            await subject.link.write("one-more", b"x")
        await subject.link.remove("many", recursive=True)
        await subject.link.write("one-more", b"x")
