"""Conformance: what a program is given, and what is said about its end."""

from __future__ import annotations

import asyncio
import hashlib
import os

import pytest

from capsule.errors import ConflictError, ForbiddenError, InvalidError, NotFoundError
from capsule.model import ExecId, Isolation, Reason
from capsule.testing.harness import ENV, Subject, drain


class TestExec:
    async def test_arguments_arrive_as_they_were_given(self, subject: Subject) -> None:
        argv = ("a b", "", "'\"$HOME`", "new\nline", "ünï→🐍", "caf\udce9", "-x", "*")
        code = (
            "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
        )
        result = await subject.python(code, *argv)
        assert result.stdout.split(b"\0") == [os.fsencode(word) for word in argv]

    async def test_the_environment_is_exactly_what_was_given(self, subject: Subject) -> None:
        env = {"A": "1", "EMPTY": "", "LINES": "x\ny", "BYTES": "\udcff", "PATH": "/usr/bin:/bin"}
        result = await subject.run("env", "-0", env=env)
        wanted = {os.fsencode(f"{name}={value}") for name, value in env.items()}
        assert set(result.stdout.rstrip(b"\0").split(b"\0")) == wanted

    async def test_an_empty_environment_is_possible(self, subject: Subject) -> None:
        assert (await subject.run("/usr/bin/env", env={})).stdout == b""

    async def test_programs_are_looked_up_in_the_given_path(self, subject: Subject) -> None:
        await subject.link.write("bin/greet", b"#!/bin/sh\necho hello", mode=0o755)
        env = {"PATH": f"/nowhere:{await subject.workspace()}/bin:/usr/bin"}
        assert (await subject.run("greet", env=env)).stdout == b"hello\n"
        with pytest.raises(NotFoundError):
            await subject.run("greet", env={"PATH": "/usr/bin"})

    async def test_standard_streams_can_be_opened_by_their_names(self, subject: Subject) -> None:
        if subject.box.isolation is Isolation.GVISOR:
            pytest.skip("gVisor lets nobody open a pipe but the user who made it")
        result = await subject.sh("cat /dev/stdin > /dev/stdout; echo e > /dev/stderr", input=b"in")
        assert (result.stdout, result.stderr) == (b"in", b"e\n")

    async def test_the_workspace_is_where_programs_start(self, subject: Subject) -> None:
        assert await subject.output("echo x > made-here; pwd -P >&2; pwd")
        assert await subject.content("/workspace/made-here") == b"x\n"

    async def test_another_working_directory_can_be_given(self, subject: Subject) -> None:
        await subject.link.mkdir("/workspace/sub/dir")
        await subject.sh("echo x > file", cwd="/workspace/sub/dir")
        assert await subject.content("/workspace/sub/dir/file") == b"x\n"

    async def test_a_missing_working_directory_is_not_found(self, subject: Subject) -> None:
        with pytest.raises(NotFoundError, match="working directory not found: /workspace/nosuch"):
            await subject.run("true", cwd="/workspace/nosuch")

    async def test_a_file_is_no_working_directory(self, subject: Subject) -> None:
        await subject.link.write("file", b"")
        with pytest.raises(InvalidError, match="working directory"):
            await subject.run("true", cwd="/workspace/file")

    @pytest.mark.parametrize("name", ["no-such-program", "/workspace/no-such", "./no-such"])
    async def test_a_missing_program_is_not_found(self, subject: Subject, name: str) -> None:
        with pytest.raises(NotFoundError, match=f"program not found: {name}"):
            await subject.run(name)

    async def test_a_file_that_may_not_be_executed_is_forbidden(self, subject: Subject) -> None:
        await subject.link.write("script", b"#!/bin/sh\n", mode=0o644)
        with pytest.raises(ForbiddenError, match=r"program not executable: \./script"):
            await subject.run("./script")

    async def test_a_directory_is_no_program(self, subject: Subject) -> None:
        await subject.link.mkdir("dir")
        with pytest.raises(ForbiddenError, match="program not executable"):
            await subject.run("./dir")

    async def test_a_file_of_no_known_format_is_invalid(self, subject: Subject) -> None:
        await subject.link.write("noise", b"\x01\x02\x03\x04", mode=0o755)
        with pytest.raises(InvalidError, match=r"\./noise"):
            await subject.run("./noise")

    async def test_a_missing_interpreter_of_a_script_is_not_found(self, subject: Subject) -> None:
        await subject.link.write("script", b"#!/nowhere/interpreter\n", mode=0o755)
        with pytest.raises(NotFoundError):
            await subject.run("./script")

    @pytest.mark.parametrize("argv", [(), ("",), ("true", "a\0b"), ("a\0b",)])
    async def test_impossible_arguments_are_refused(
        self, subject: Subject, argv: tuple[str, ...]
    ) -> None:
        with pytest.raises((InvalidError, NotFoundError)):
            await subject.run(*argv)

    @pytest.mark.parametrize("env", [{"A=B": "c"}, {"": "x"}, {"A": "b\0c"}, {"A\0": "b"}])
    async def test_impossible_variables_are_refused(
        self, subject: Subject, env: dict[str, str]
    ) -> None:
        with pytest.raises(InvalidError):
            await subject.run("/bin/true", env=env)

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "x" * 65, "a\0b", "../x"])
    async def test_impossible_ids_are_refused(self, subject: Subject, name: str) -> None:
        with pytest.raises(InvalidError):
            await subject.run("true", id=ExecId(name))

    async def test_an_id_is_taken_once(self, subject: Subject) -> None:
        await subject.run("true", id=subject.id("mine"))
        with pytest.raises(ConflictError):
            await subject.run("true", id=subject.id("mine"))

    async def test_an_exec_that_never_ran_does_not_keep_its_id(self, subject: Subject) -> None:
        with pytest.raises(NotFoundError):
            await subject.run("no-such-program", id=subject.id("mine"))
        assert (await subject.run("true", id=subject.id("mine"))).exit.exit_code == 0

    async def test_the_longest_id_is_fine(self, subject: Subject) -> None:
        assert (await subject.run("true", id=ExecId("aZ9_-" + "x" * 59))).exit.exit_code == 0

    async def test_programs_are_not_root(self, subject: Subject) -> None:
        assert await subject.output("id -u") != "0"

    async def test_programs_get_no_stray_descriptor(self, subject: Subject) -> None:
        code = (
            "import os\n"
            "for fd in range(1024):\n"
            "    try: os.fstat(fd); print(fd)\n"
            "    except OSError: pass\n"
        )
        assert (await subject.python(code)).stdout.split() == [b"0", b"1", b"2"]

    async def test_many_execs_at_once_keep_their_output_apart(self, subject: Subject) -> None:
        scripts = [f"for i in 1 2 3; do echo {n}; done; exit {n}" for n in range(20)]
        results = await asyncio.gather(*map(subject.sh, scripts))
        for n, result in enumerate(results):
            assert (result.exit.exit_code, result.stdout) == (n, b"%d\n" % n * 3)

    async def test_execs_are_listed_with_their_state(self, subject: Subject) -> None:
        await subject.sh("echo done; exit 7", id=subject.id("ended"))
        id = subject.id("going")
        async with await subject.start_sh("echo on; cat", id=id, stdin=True) as stream:
            await anext(stream)
            listed = {info.id: info for info in await subject.link.execs()}
            ended, going = listed[subject.id("ended")], listed[id]
            assert (ended.running, going.running) == (False, True)
            assert ended.exit is not None and ended.exit.exit_code == 7
            assert going.exit is None and going.pid == stream.pid and not going.tty
            assert going.argv == ("/bin/sh", "-c", "echo on; cat")
            assert (ended.stdout_bytes, going.stdout_bytes) == (5, 3)
            assert ended.started_ms_ago >= going.started_ms_ago >= 0


class TestExit:
    @pytest.mark.parametrize("code", [0, 1, 2, 42, 126, 127, 128, 137, 255])
    async def test_an_exit_code_is_the_programs_own(self, subject: Subject, code: int) -> None:
        exit = (await subject.sh(f"exit {code}")).exit
        assert (exit.reason, exit.exit_code, exit.signal) == (Reason.EXITED, code, 0)

    @pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("KILL", 9), ("HUP", 1)])
    async def test_a_signal_is_said_as_a_shell_says_it(
        self, subject: Subject, name: str, number: int
    ) -> None:
        exit = (await subject.sh(f"kill -{name} $$")).exit
        assert (exit.reason, exit.exit_code, exit.signal) == (
            Reason.SIGNALED,
            128 + number,
            number,
        )

    async def test_a_crash_is_a_signal(self, subject: Subject) -> None:
        code = "import ctypes; ctypes.string_at(0)"
        exit = (await subject.python(code)).exit
        assert (exit.reason, exit.signal) == (Reason.SIGNALED, 11)

    async def test_time_cpu_and_memory_are_measured(self, subject: Subject) -> None:
        code = (
            "import time\nx = bytearray(60_000_000)\nend = time.process_time() + 0.3\n"
            "while time.process_time() < end: pass\ntime.sleep(0.2)"
        )
        exit = (await subject.python(code)).exit
        assert exit.duration_ms >= 500
        assert 250 <= exit.cpu_ms <= exit.duration_ms
        assert exit.max_rss_bytes >= 60_000_000

    async def test_an_exec_lasts_as_long_as_its_program(self, subject: Subject) -> None:
        """Not as long as whoever inherited its output: a daemon must not hold it up."""
        result = await subject.sh("sleep 1000 & echo started")
        assert (result.exit.exit_code, result.stdout) == (0, b"started\n")
        assert result.exit.duration_ms < 5000


class TestInput:
    async def test_without_input_a_program_reads_nothing(self, subject: Subject) -> None:
        assert (await subject.run("cat")).stdout == b""

    @pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 3_000_000])
    async def test_input_arrives_whole_and_ends(self, subject: Subject, size: int) -> None:
        data = os.urandom(size)
        result = await subject.run("sha256sum", input=data)
        assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()

    async def test_a_program_need_not_read_its_input(self, subject: Subject) -> None:
        result = await subject.run("true", input=bytes(5_000_000))
        assert result.exit.exit_code == 0

    async def test_input_and_output_larger_than_any_pipe(self, subject: Subject) -> None:
        data = os.urandom(4_000_000)
        assert (await subject.run("cat", input=data)).stdout == data

    async def test_input_comes_while_the_program_runs(self, subject: Subject) -> None:
        async with await subject.start("cat", stdin=True) as stream:
            for word in (b"one\n", b"two\n"):
                await stream.send(word)
                item = await anext(stream)
                assert getattr(item, "data", None) == word
            await stream.send_eof()
            await drain(stream)
            assert stream.exit is not None and stream.exit.exit_code == 0

    async def test_input_can_come_from_another_connection(self, subject: Subject) -> None:
        async with await subject.start("cat", stdin=True) as stream:
            await subject.link.send_input(stream.exec_id, b"\xff\0one\n")
            await subject.link.send_input(stream.exec_id, bytes(200_000))
            await subject.link.send_input(stream.exec_id, b"end", eof=True)
            assert (
                b"".join((await drain(stream)).values()) == b"\xff\0one\n" + bytes(200_000) + b"end"
            )

    async def test_input_for_nobody_is_not_found(self, subject: Subject) -> None:
        with pytest.raises(NotFoundError):
            await subject.link.send_input(ExecId("nosuch"), b"x")


class TestCarry:
    async def test_what_is_written_to_descriptor_3_is_carried(self, subject: Subject) -> None:
        result = await subject.sh("printf 'A=1\\0B=2' >&3; echo out", carry=True)
        assert (result.carry, result.stdout) == (b"A=1\0B=2", b"out\n")

    async def test_without_carry_descriptor_3_is_closed(self, subject: Subject) -> None:
        result = await subject.sh("echo x >&3")
        assert result.exit.exit_code != 0 and result.carry == b""

    async def test_a_background_process_holding_it_does_not_hold_up(self, subject: Subject) -> None:
        result = await subject.sh("sleep 1000 & echo kept >&3", carry=True)
        assert result.carry == b"kept\n"

    async def test_too_much_of_it_is_not_too_much_for_us(self, subject: Subject) -> None:
        code = "import os\nfor _ in range(1000): os.write(3, bytes(1000))"
        result = await subject.run("python3", "-c", code, carry=True, env=ENV)
        assert result.exit.exit_code == 0
        assert len(result.carry) <= 256 * 1024
