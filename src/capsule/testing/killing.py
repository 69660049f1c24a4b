"""Conformance: a timeout, a kill or an output limit ends everything that an exec started.

Each victim is seen alive before it is asserted dead.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from capsule.errors import InvalidError, NotFoundError, UnavailableError
from capsule.link import ExecStream
from capsule.model import ExecId, Reason
from capsule.testing.harness import Subject, drain, read_until, until

# Each runs `victim(name)` in some process that tries not to be found, and leaves its id in that
# file, in a folder of its own.
PRELUDE = """
import os, signal, sys, time
os.makedirs(PLACE, exist_ok=True)
os.chdir(PLACE)

def victim(name="victim"):
    with open(name + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(name + ".part", name)
    while True:
        time.sleep(0.05)

def ignore_all():
    for number in range(1, signal.NSIG):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass

def close_all():
    for fd in range(256):
        try: os.close(fd)
        except OSError: pass

def wait():
    while True:
        time.sleep(0.05)
"""

EVASIONS = {
    "itself": "victim()",
    "ignores_signals": "ignore_all(); victim()",
    "stops_itself": """
if os.fork() == 0:
    open("victim", "w").write(str(os.getppid()))
    os._exit(0)
os.kill(os.getpid(), signal.SIGSTOP)
wait()
""",
    "child": "if os.fork() == 0: victim()\nwait()",
    "child_in_its_own_session": "if os.fork() == 0: os.setsid(); victim()\nwait()",
    "double_fork": """
if os.fork() == 0:
    if os.fork() == 0: victim()
    os._exit(0)
wait()
""",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ignore_all(); close_all()
        victim()
    os._exit(0)
wait()
""",
    "stopped_daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            open("victim", "w").write(str(os.getppid()))
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        wait()
    os._exit(0)
wait()
""",
    "another_program_without_environment": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sh", ["innocent", "-c", "trap '' TERM HUP INT; echo $$ > victim;"
                              " while :; do /bin/sleep 0.05; done"], {})
    os._exit(0)
wait()
""",
    "keeps_moving": """
if os.fork() == 0:
    os.setsid()
    for _ in range(1000000):
        if os.fork() != 0: os._exit(0)
        open("victim.part", "w").write(str(os.getpid())); os.rename("victim.part", "victim")
        time.sleep(0.001)
wait()
""",
}

evasions = pytest.mark.parametrize("evasion", list(EVASIONS))


async def hunted(subject: Subject, evasion: str, **options: object) -> tuple[ExecStream, int]:
    """The exec with its victim, which has been seen alive."""
    stream = await subject.start_python(placed(evasion, EVASIONS[evasion]), **options)
    pid = await subject.pid_in(f"{evasion}/victim")
    if evasion != "keeps_moving":
        assert await subject.is_alive(pid)
    return stream, pid


def placed(evasion: str, code: str) -> str:
    return f"PLACE = {evasion!r}\n{PRELUDE}\n{code}"


async def nobody_left(subject: Subject, evasion: str, pid: int) -> None:
    last = int(await subject.content(f"{evasion}/victim"))
    assert not await subject.is_alive(pid, last)

    async def alone() -> bool:
        return (await subject.link.usage()).processes in (0, None)

    await until(alone, what="no process left in the box")
    assert int(await subject.content(f"{evasion}/victim")) == last


class TestKill:
    async def test_a_timeout_ends_everything(self, subject: Subject) -> None:
        """One begins after the other, and each has its own two seconds: nobody waits ten times."""
        hunts: dict[str, tuple[ExecStream, int]] = {}
        async with AsyncExitStack() as streams:
            for evasion in EVASIONS:
                hunts[evasion] = await hunted(subject, evasion, timeout=2.0)
                await streams.enter_async_context(hunts[evasion][0])
            for evasion, (stream, _) in hunts.items():
                await drain(stream)
                exit = stream.exit
                assert exit is not None and exit.reason is Reason.TIMED_OUT, evasion
                assert exit.timed_out, evasion
                assert 2000 <= exit.duration_ms < 5000, evasion
        for evasion, (_, pid) in hunts.items():
            await nobody_left(subject, evasion, pid)

    @evasions
    async def test_a_kill_ends_everything(self, subject: Subject, evasion: str) -> None:
        stream, pid = await hunted(subject, evasion)
        async with stream:
            assert await subject.link.kill(stream.exec_id) is True
            await nobody_left(subject, evasion, pid)
            await drain(stream)
        assert stream.exit is not None
        assert (stream.exit.reason, stream.exit.exit_code) == (Reason.CANCELLED, 137)

    @pytest.mark.parametrize("evasion", ["daemon", "stopped_daemon"])
    async def test_an_output_limit_ends_everything(self, subject: Subject, evasion: str) -> None:
        flood = EVASIONS[evasion].rstrip().removesuffix("wait()") + (
            "while not os.path.exists('go'): time.sleep(0.02)\nwhile True: print('x' * 1000)"
        )
        async with await subject.start_python(
            placed(evasion, flood), output_limit=50_000, on_limit="kill"
        ) as stream:
            pid = await subject.pid_in(f"{evasion}/victim")
            assert await subject.is_alive(pid)
            await subject.link.write(f"{evasion}/go", b"")
            await drain(stream)
        assert stream.exit is not None and stream.exit.reason is Reason.OUTPUT_LIMIT
        await nobody_left(subject, evasion, pid)

    async def test_a_timeout_is_kept_to(self, subject: Subject) -> None:
        exit = (await subject.sh("sleep 1000", timeout=0.3)).exit
        assert (exit.reason, exit.exit_code, exit.signal) == (Reason.TIMED_OUT, 137, 9)
        assert 300 <= exit.duration_ms < 2000

    async def test_output_before_the_timeout_is_kept(self, subject: Subject) -> None:
        result = await subject.sh("echo before; echo too >&2; sleep 1000", timeout=0.5)
        assert (result.stdout, result.stderr) == (b"before\n", b"too\n")

    async def test_a_program_quicker_than_its_timeout_just_exits(self, subject: Subject) -> None:
        exit = (await subject.sh("exit 3", timeout=5)).exit
        assert (exit.reason, exit.exit_code) == (Reason.EXITED, 3)

    async def test_a_second_kill_finds_nothing_running(self, subject: Subject) -> None:
        async with await subject.start("sleep", "1000") as stream:
            assert await subject.link.kill(stream.exec_id) is True
            assert await subject.link.kill(stream.exec_id) is False
            await drain(stream)
            assert stream.exit is not None and stream.exit.reason is Reason.CANCELLED

    async def test_killing_what_never_was_is_not_found(self, subject: Subject) -> None:
        with pytest.raises(NotFoundError):
            await subject.link.kill(ExecId("nosuch"))

    async def test_an_unknown_signal_is_invalid(self, subject: Subject) -> None:
        async with await subject.start("sleep", "1000") as stream:
            with pytest.raises(InvalidError):
                await subject.link.kill(stream.exec_id, signal="NOSUCH")
            assert await subject.is_alive(stream.pid)

    async def test_a_kill_touches_no_other_exec(self, subject: Subject) -> None:
        async with await subject.start("sleep", "1000") as first:
            async with await subject.start_sh("echo up; sleep 1000 & wait") as second:
                await read_until(second, b"up")
                await subject.link.kill(first.exec_id)
                assert not await subject.is_alive(first.pid)
                assert await subject.is_alive(second.pid)


class TestSignals:
    async def test_a_polite_signal_lets_a_program_finish(self, subject: Subject) -> None:
        script = "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.02; done"
        async with await subject.start_sh(script) as stream:
            await read_until(stream, b"up")
            assert await subject.link.kill(stream.exec_id, signal="TERM", grace=10) is True
            assert b"bye" in b"".join((await drain(stream)).values())
        assert stream.exit is not None and stream.exit.exit_code == 5

    async def test_who_ignores_it_is_killed_after_the_grace(self, subject: Subject) -> None:
        script = "trap '' TERM; echo up; while :; do sleep 0.02; done"
        async with await subject.start_sh(script) as stream:
            await read_until(stream, b"up")
            await subject.link.kill(stream.exec_id, signal="TERM", grace=0.3)
            assert await subject.is_alive(stream.pid)
            await drain(stream)
        assert stream.exit is not None
        assert (stream.exit.reason, stream.exit.signal) == (Reason.CANCELLED, 9)
        assert not await subject.is_alive(stream.pid)

    async def test_a_signal_without_grace_is_only_a_signal(self, subject: Subject) -> None:
        script = "trap 'echo one' USR1; echo up; while :; do sleep 0.02; done"
        async with await subject.start_sh(script) as stream:
            await read_until(stream, b"up")
            assert await subject.link.kill(stream.exec_id, signal="USR1") is True
            await read_until(stream, b"one")
            assert await subject.is_alive(stream.pid)

    async def test_the_stream_can_signal_too(self, subject: Subject) -> None:
        script = "trap 'echo int' INT; echo up; while :; do sleep 0.02; done"
        async with await subject.start_sh(script) as stream:
            await read_until(stream, b"up")
            await stream.signal("INT")
            await read_until(stream, b"int")
            await stream.signal("KILL")
            await drain(stream)
        assert stream.exit is not None and stream.exit.signal == 9

    async def test_input_after_a_signal_arrives_after_it(self, subject: Subject) -> None:
        code = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("up")
for line in sys.stdin.buffer.raw:
    came = signal.sigpending()
    came and signal.sigwait(came)
    print(line.decode().strip(), len(came))
"""
        async with await subject.start_python(code, stdin=True) as stream:
            await read_until(stream, b"up\n")
            for number in range(200):
                await stream.signal("INT")
                await stream.send(b"%d\n" % number)
                await read_until(stream, b"%d 1\n" % number)
            await stream.send_eof()
            await drain(stream)

    async def test_a_program_that_dies_of_a_sent_signal_was_signaled(
        self, subject: Subject
    ) -> None:
        async with await subject.start_sh("echo up; exec sleep 1000") as stream:
            await read_until(stream, b"up")
            await stream.signal("TERM")
            await drain(stream)
        assert stream.exit is not None
        assert stream.exit.reason in (Reason.SIGNALED, Reason.CANCELLED)
        assert (stream.exit.exit_code, stream.exit.signal) == (143, 15)


class TestBackground:
    async def test_a_background_process_survives_and_dies_on_kill(self, subject: Subject) -> None:
        result = await subject.sh(
            "setsid sh -c 'echo $$ > victim; exec sleep 1000' >/dev/null 2>&1 &", id=subject.id("e")
        )
        assert result.exit.reason is Reason.EXITED
        pid = await subject.pid_in("victim")
        assert await subject.is_alive(pid)
        assert await subject.link.kill(subject.id("e")) is False
        assert not await subject.is_alive(pid)

    async def test_a_timeout_does_not_reach_beyond_the_exit(self, subject: Subject) -> None:
        await subject.sh("sh -c 'echo $$ > victim; exec sleep 1000' &", timeout=0.5)
        pid = await subject.pid_in("victim")
        await subject.sh("sleep 0.8")
        assert await subject.is_alive(pid)

    async def test_orphans_are_reaped(self, subject: Subject) -> None:
        code = (
            "import os\n"
            "for _ in range(40):\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        os.spawnlp(os.P_NOWAIT, 'true', 'true')\n"
            "        os._exit(0)\n"
            "    os.wait()\n"
        )
        for _ in range(3):
            assert (await subject.python(code)).exit.exit_code == 0

        async def none_left() -> bool:
            return (await subject.link.usage()).processes in (0, None)

        await until(none_left, what="every zombie reaped")

    async def test_a_box_survives_a_kill_of_everything(self, subject: Subject) -> None:
        result = await subject.sh("kill -9 -1")
        assert result.exit.signal in (0, 9)
        assert await subject.output("echo alive") == "alive"
        assert (await subject.link.ping())["execs_running"] == 0

    async def test_destroying_a_box_ends_its_streams_without_an_exit(
        self, subject: Subject
    ) -> None:
        async with await subject.start("sleep", "1000") as stream:
            await subject.box.destroy()
            with pytest.raises(UnavailableError):
                await drain(stream)
            assert stream.exit is None
