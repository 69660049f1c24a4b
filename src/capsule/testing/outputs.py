"""Conformance: output arrives whole, is kept with its offsets, and can be read again."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from capsule.errors import CapsuleError, GoneError, InvalidError, NotFoundError
from capsule.link import Gap, Output
from capsule.model import MIB, ExecId, Reason, Stream
from capsule.testing.harness import Subject, drain, read_until, until


class TestOutput:
    async def test_stdout_and_stderr_are_apart(self, subject: Subject) -> None:
        result = await subject.sh("echo out; echo err >&2; echo more")
        assert (result.stdout, result.stderr) == (b"out\nmore\n", b"err\n")
        assert (result.exit.stdout_bytes, result.exit.stderr_bytes) == (9, 4)

    async def test_every_byte_arrives_as_it_was_written(self, subject: Subject) -> None:
        code = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 10)"
        assert (await subject.python(code)).stdout == bytes(range(256)) * 10

    async def test_a_last_line_without_newline_arrives(self, subject: Subject) -> None:
        assert (await subject.sh("printf 'a\\nlast'")).stdout == b"a\nlast"

    async def test_no_output_is_no_output(self, subject: Subject) -> None:
        result = await subject.sh(":")
        assert (result.stdout, result.stderr) == (b"", b"")

    async def test_ten_mebibytes_arrive_whole(self, subject: Subject) -> None:
        code = (
            "import sys\n"
            "for n in range(10 * 1024): sys.stdout.buffer.write((b'%07d\\n' % n) * 128)\n"
        )
        expected = hashlib.sha256()
        for n in range(10 * 1024):
            expected.update((b"%07d\n" % n) * 128)
        result = await subject.python(code, output_limit=16 * MIB)
        assert len(result.stdout) == result.exit.stdout_bytes == 10 * MIB
        assert hashlib.sha256(result.stdout).hexdigest() == expected.hexdigest()

    async def test_one_huge_line_is_nothing_special(self, subject: Subject) -> None:
        result = await subject.sh("head -c 3000000 /dev/zero | tr '\\0' x", output_limit=4 * MIB)
        assert result.stdout == b"x" * 3_000_000

    async def test_both_streams_can_be_full_at_once(self, subject: Subject) -> None:
        script = "head -c 1000000 /dev/zero & head -c 1000000 /dev/zero >&2; wait"
        result = await subject.sh(script)
        assert (len(result.stdout), len(result.stderr)) == (1_000_000, 1_000_000)

    async def test_offsets_have_neither_gap_nor_overlap(self, subject: Subject) -> None:
        script = "for i in 1 2 3 4 5; do echo $i; echo e$i >&2; head -c 70000 /dev/zero; done"
        at = {Stream.STDOUT: 0, Stream.STDERR: 0}
        async with await subject.start_sh(script) as stream:
            async for item in stream:
                assert isinstance(item, Output)
                assert item.offset == at[item.stream]
                at[item.stream] += len(item.data)
        assert stream.exit is not None
        assert at == {
            Stream.STDOUT: stream.exit.stdout_bytes,
            Stream.STDERR: stream.exit.stderr_bytes,
        }

    async def test_output_comes_while_the_program_runs(self, subject: Subject) -> None:
        async with await subject.start_sh("echo first; read x; echo second", stdin=True) as stream:
            assert await read_until(stream, b"first") == b"first\n"
            await stream.send(b"go\n")
            assert (await drain(stream))[Stream.STDOUT] == b"second\n"


class TestOutputLimit:
    SCRIPT = "head -c 100000 /dev/zero | tr '\\0' a; printf end; printf oops >&2; exit 3"

    async def test_head_keeps_the_first_bytes_and_lets_it_run(self, subject: Subject) -> None:
        result = await subject.sh(self.SCRIPT, output_limit=1000)
        assert result.stdout == b"a" * 1000
        assert (result.exit.reason, result.exit.exit_code) == (Reason.EXITED, 3)
        assert result.exit.stdout_bytes == 100_003
        assert result.exit.stdout_truncated and not result.exit.stderr_truncated
        assert result.stderr == b"oops"

    async def test_tail_keeps_the_last_bytes(self, subject: Subject) -> None:
        result = await subject.sh(self.SCRIPT, output_limit=1000, keep="tail")
        assert result.stdout == b"a" * 997 + b"end"
        assert result.exit.stdout_bytes == 100_003
        assert result.exit.stdout_truncated and not result.exit.stderr_truncated

    async def test_flow_waits_for_a_slow_reader_who_misses_nothing(self, subject: Subject) -> None:
        size, kept = 6 * MIB, 2 * MIB
        script = f"head -c {size} /dev/zero | tr '\\0' a; printf end"
        async with await subject.start(
            "sh", "-c", script, keep="flow", output_limit=kept
        ) as stream:

            async def waits() -> bool:
                (info,) = [x for x in await subject.link.execs() if x.id == stream.exec_id]
                assert info.running and info.stdout_bytes < kept
                return info.stdout_bytes >= kept // 2

            await until(waits, what="output to read")
            assert await waits()
            items = [item async for item in stream]
        assert not [item for item in items if isinstance(item, Gap)]
        received = b"".join(item.data for item in items if isinstance(item, Output))
        assert (len(received), received[-4:]) == (size + 3, b"aend")

    async def test_flow_waits_for_nobody_if_nobody_reads(self, subject: Subject) -> None:
        size, kept = 6 * MIB, 2 * MIB
        script = f"head -c {size} /dev/zero | tr '\\0' a; printf end"
        stream = await subject.start_sh(script, keep="flow", output_limit=kept)
        await stream.aclose()
        async with await subject.link.attach(stream.exec_id) as later:
            assert (await drain(later))[Stream.STDOUT].endswith(b"aend")
        assert later.exit is not None and later.exit.stdout_bytes == size + 3

    async def test_kill_ends_it(self, subject: Subject) -> None:
        result = await subject.run("yes", output_limit=10_000, on_limit="kill")
        assert result.exit.reason is Reason.OUTPUT_LIMIT
        assert result.stdout == b"y\n" * 5000
        assert result.exit.stdout_truncated and result.exit.stdout_bytes > 10_000
        assert result.exit.exit_code == 137

    async def test_stderr_has_a_limit_of_its_own(self, subject: Subject) -> None:
        result = await subject.sh("echo fine; yes | head -c 5000 >&2", output_limit=100)
        assert (result.stdout, len(result.stderr)) == (b"fine\n", 100)
        assert result.exit.stderr_truncated and not result.exit.stdout_truncated

    @pytest.mark.parametrize("on_limit", ["truncate", "kill"])
    async def test_exactly_the_limit_is_within_it(self, subject: Subject, on_limit: str) -> None:
        script = "head -c 5000 /dev/zero; exit 4"
        result = await subject.sh(script, output_limit=5000, on_limit=on_limit)
        assert (len(result.stdout), result.exit.exit_code) == (5000, 4)
        assert (result.exit.reason, result.exit.stdout_truncated) == (Reason.EXITED, False)


class TestAttach:
    async def test_two_readers_see_the_same(self, subject: Subject) -> None:
        script = "read x; for i in $(seq 500); do echo line $i; done"
        async with await subject.start_sh(script, stdin=True) as first:
            async with await subject.link.attach(first.exec_id) as second:
                await first.send(b"go\n")
                one, two = await asyncio.gather(drain(first), drain(second))
        assert one == two and one[Stream.STDOUT].endswith(b"line 500\n")
        assert first.exit == second.exit

    async def test_a_lost_client_does_not_kill(self, subject: Subject) -> None:
        stream = await subject.start_sh("echo before; sleep 0.3; echo after; echo x > file")
        await read_until(stream, b"before")
        await stream.aclose()
        await until(lambda: subject.exists("file"), what="the program goes on")
        async with await subject.link.attach(stream.exec_id) as again:
            assert await drain(again) == {Stream.STDOUT: b"before\nafter\n"}
        assert again.exit is not None and again.exit.exit_code == 0

    async def test_a_cut_reader_goes_on_where_it_stopped(self, subject: Subject) -> None:
        code = "for n in range(60000): print(f'{n:07d}')"
        stream = await subject.start_python(code, output_limit=MIB)
        received = b""
        cuts = 0
        while True:
            async with stream:
                async for item in stream:
                    assert isinstance(item, Output)
                    received += item.data
                    if cuts < 20:
                        break
            if stream.exit is not None:
                break
            cuts += 1
            reached = stream.offsets[Stream.STDOUT]
            stream = await subject.link.attach(stream.exec_id, stdout=reached)
        assert received == b"".join(b"%07d\n" % n for n in range(60_000))
        assert cuts > 1

    async def test_an_ended_exec_can_be_read_again_and_again(self, subject: Subject) -> None:
        await subject.sh("echo out; echo err >&2; exit 9", id=subject.id("e"))
        for _ in range(3):
            async with await subject.link.attach(subject.id("e")) as stream:
                assert await drain(stream) == {Stream.STDOUT: b"out\n", Stream.STDERR: b"err\n"}
            assert stream.exit is not None and stream.exit.exit_code == 9

    async def test_attach_begins_at_the_offsets_given(self, subject: Subject) -> None:
        await subject.sh("printf 0123456789; printf abcdef >&2", id=subject.id("e"))
        async with await subject.link.attach(subject.id("e"), stdout=7, stderr=6) as stream:
            assert await drain(stream) == {Stream.STDOUT: b"789"}

    async def test_an_offset_beyond_the_end_is_invalid(self, subject: Subject) -> None:
        await subject.sh("printf 0123456789", id=subject.id("e"))
        with pytest.raises(InvalidError):
            await subject.link.attach(subject.id("e"), stdout=11)

    async def test_an_unknown_exec_is_not_found(self, subject: Subject) -> None:
        with pytest.raises(NotFoundError):
            await subject.link.attach(ExecId("nosuch"))

    async def test_what_was_dropped_is_said_to_be_missing(self, subject: Subject) -> None:
        script = "head -c 300000 /dev/zero; printf end"
        await subject.sh(script, id=subject.id("e"), keep="tail", output_limit=1000)
        async with await subject.link.attach(subject.id("e")) as stream:
            items = [item async for item in stream]
        assert items[0] == Gap(Stream.STDOUT, 0, 299_003)
        data = b"".join(item.data for item in items if isinstance(item, Output))
        assert data == bytes(997) + b"end"

    async def test_an_attached_client_may_type(self, subject: Subject) -> None:
        async with await subject.start("cat", stdin=True) as first:
            async with await subject.link.attach(first.exec_id, input=True) as second:
                await second.send(b"hello\n")
                await read_until(first, b"hello\n")
                await second.send_eof()
                await drain(first)
        assert first.exit is not None and first.exit.exit_code == 0

    async def test_a_client_that_only_listens_may_not_type(self, subject: Subject) -> None:
        async with await subject.start("cat", stdin=True) as first:
            async with await subject.link.attach(first.exec_id) as second:
                await second.send(b"hello\n")
                with pytest.raises(CapsuleError):
                    await drain(second)
            await first.send_eof()
            assert await drain(first) == {}

    async def test_many_exits_are_remembered_but_not_all(self, subject: Subject) -> None:
        """At least the last two hundred; and not for ever, or a busy box would grow for ever."""
        for n in range(0, 400, 20):
            await asyncio.gather(
                *(subject.run("true", id=subject.id(f"n{m}")) for m in range(n, n + 20))
            )
        async with await subject.link.attach(subject.id("n399")) as stream:
            await drain(stream)
        async with await subject.link.attach(subject.id("n210")) as stream:
            await drain(stream)
        with pytest.raises((NotFoundError, GoneError)):
            await subject.link.attach(subject.id("n0"))
        assert 200 <= len(await subject.link.execs()) < 400
