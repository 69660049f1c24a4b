"""Conformance: a terminal is a real one."""

from __future__ import annotations

import asyncio

import pytest

from capsule.errors import InvalidError
from capsule.link import ExecStream, Gap
from capsule.model import ExecId, Reason, Stream
from capsule.testing.harness import ENV, Subject, drain, read_until

TERMINAL_ENV = {**ENV, "TERM": "xterm-256color", "PS1": "$ ", "PS2": "> "}

# Two processes in the foreground, each of which says what it caught. A handler would not do: a
# signal that comes just before a program goes to sleep does not wake it.
CATCHER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
child = os.fork()
if child: print("up")
os.write(1, b"caught %d\\n" % signal.sigwait([signal.SIGINT]))
if child: os.wait()
"""


async def start(subject: Subject, *argv: str, **options: object) -> ExecStream:
    options = {"tty": True, "stdin": True, "env": TERMINAL_ENV, **options}
    return await subject.start(*argv, **options)


class TestTerminal:
    async def test_programs_see_a_terminal(self, subject: Subject) -> None:
        script = "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo yes; : > /dev/tty && echo controlling"
        async with await start(subject, "sh", "-c", script) as stream:
            output = await drain(stream)
        assert set(output) == {Stream.PTY}
        assert output[Stream.PTY].split() == [b"yes", b"controlling"]
        assert stream.exit is not None and stream.exit.stdout_bytes == len(output[Stream.PTY])

    async def test_without_one_they_do_not(self, subject: Subject) -> None:
        assert (await subject.sh("[ -t 0 ] || [ -t 1 ] || echo none")).stdout == b"none\n"
        assert (await subject.sh(": > /dev/tty")).exit.exit_code != 0

    async def test_what_is_typed_is_echoed_and_read(self, subject: Subject) -> None:
        async with await start(subject, "sh", "-c", "read line; echo got $line") as stream:
            await stream.send(b"hello\r")
            output = (await drain(stream))[Stream.PTY]
        assert output.split() == [b"hello", b"got", b"hello"]

    async def test_the_window_has_the_size_asked_for(self, subject: Subject) -> None:
        async with await start(subject, "stty", "size", rows=33, cols=101) as stream:
            assert (await drain(stream))[Stream.PTY] == b"33 101\r\n"

    async def test_a_resize_is_noticed(self, subject: Subject) -> None:
        script = "trap 'stty size' WINCH; echo up; while :; do sleep 0.02; done"
        async with await start(subject, "sh", "-c", script) as stream:
            await read_until(stream, b"up")
            await stream.resize(50, 132)
            await read_until(stream, b"50 132")
            await subject.link.resize(stream.exec_id, 20, 40)
            await read_until(stream, b"20 40")

    async def test_resizing_what_has_no_terminal_is_invalid(self, subject: Subject) -> None:
        async with await subject.start("sleep", "1000") as stream:
            with pytest.raises(InvalidError):
                await subject.link.resize(stream.exec_id, 20, 40)

    async def test_control_c_interrupts_the_foreground(self, subject: Subject) -> None:
        async with await start(subject, "python3", "-u", "-c", CATCHER) as stream:
            await read_until(stream, b"up")
            await stream.send(b"\x03")
            output = (await drain(stream))[Stream.PTY]
        assert output.count(b"caught 2") == 2

    async def test_control_c_ends_a_program(self, subject: Subject) -> None:
        async with await start(subject, "sh", "-c", "echo up; exec sleep 1000") as stream:
            await read_until(stream, b"up")
            await stream.send(b"\x03")
            await drain(stream)
        assert stream.exit is not None
        assert (stream.exit.reason, stream.exit.signal) == (Reason.SIGNALED, 2)

    async def test_control_d_is_the_end_of_input(self, subject: Subject) -> None:
        async with await start(subject, "cat") as stream:
            await stream.send(b"line\r")
            await read_until(stream, b"line\r\nline\r\n")
            await stream.send(b"\x04")
            await drain(stream)
        assert stream.exit is not None and stream.exit.exit_code == 0

    async def test_the_end_of_input_can_be_sent_as_such(self, subject: Subject) -> None:
        async with await start(subject, "cat") as stream:
            await stream.send_eof()
            await drain(stream)
        assert stream.exit is not None and stream.exit.exit_code == 0

    async def test_signals_reach_the_foreground(self, subject: Subject) -> None:
        async with await start(subject, "python3", "-u", "-c", CATCHER) as stream:
            await read_until(stream, b"up")
            await stream.signal("INT")
            output = (await drain(stream))[Stream.PTY]
        assert output.count(b"caught 2") == 2

    async def test_a_shell_has_job_control(self, subject: Subject) -> None:
        async with await start(subject, "/bin/bash", "--norc", "-i") as stream:
            await read_until(stream, b"$ ")
            await stream.send(b"sleep 1000\r")
            await read_until(stream, b"sleep 1000\r\n")
            await asyncio.sleep(
                0.2
            )  # until the shell has handed over the terminal: nothing says so
            await stream.send(b"\x1a")
            await read_until(stream, b"Stopped")
            await stream.send(b"jobs; kill %1; echo $((40+2))\r")
            await read_until(stream, b"42\r\n")
            # A shell that has not seen its job's end yet wants to be told twice.
            await stream.send(b"exit 6\rexit 6\r")
            await drain(stream)
        assert stream.exit is not None and stream.exit.exit_code == 6

    async def test_unicode_is_edited_by_characters(self, subject: Subject) -> None:
        async with await start(subject, "sh", "-c", "read line; echo got:$line") as stream:
            await stream.send("aé\x7fü→🐍\r".encode())
            assert "got:aü→🐍".encode() in (await drain(stream))[Stream.PTY]

    async def test_two_viewers_share_one_terminal(self, subject: Subject) -> None:
        async with await start(subject, "cat") as first:
            async with await subject.link.attach(first.exec_id, input=True) as second:
                await second.send(b"from the second\r")
                await read_until(first, b"second\r\nfrom the second\r\n")
                await first.send(b"from the first\r")
                await read_until(second, b"first\r\nfrom the first\r\n")

    async def test_a_dropped_viewer_comes_back_to_the_same_shell(self, subject: Subject) -> None:
        stream = await start(subject, "sh", keep="tail", output_limit=10_000, timeout=0)
        await stream.send(b"x=kept; seq 5000\r")
        await read_until(stream, b"\n5000\r\n")
        await stream.aclose()
        async with await subject.link.attach(stream.exec_id, input=True) as again:
            first = await anext(again)
            assert isinstance(first, Gap) and first.start == 0
            await read_until(again, b"5000\r\n")
            await again.send(b"echo $x; exit\r")
            assert b"kept\r\n" in (await drain(again))[Stream.PTY]

    async def test_an_exit_is_not_held_up_by_a_background_process(self, subject: Subject) -> None:
        script = "trap '' HUP; sleep 1000 & echo over"
        async with await start(subject, "sh", "-c", script) as stream:
            assert (await drain(stream))[Stream.PTY] == b"over\r\n"
        assert stream.exit is not None and stream.exit.exit_code == 0

    async def test_a_terminal_flood_is_kept_to_its_window(self, subject: Subject) -> None:
        stream = await start(subject, "sh", "-c", "seq 200000", keep="tail", output_limit=5000)
        async with stream:
            await drain(stream)
        assert stream.exit is not None and stream.exit.stdout_truncated
        async with await subject.link.attach(ExecId(stream.exec_id)) as again:
            kept = (await drain(again))[Stream.PTY]
        assert len(kept) == 5000 and kept.endswith(b"200000\r\n")
