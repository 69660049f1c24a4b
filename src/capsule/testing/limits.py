"""Conformance: limits hold, are measured, and the agent answers whatever runs inside."""

from __future__ import annotations

import asyncio
import time

import pytest

from capsule.link import ExecStream
from capsule.model import MIB, Reason
from capsule.testing.harness import Launcher, Subject, drain, until

FORK_BOMB = (
    "import os\n"
    "while True:\n"
    "    try: os.fork()\n"
    "    except OSError: pass\n"
)  # fmt: skip


class TestLimits:
    async def test_memory(self, launch: Launcher) -> None:
        subject = await launch(memory=64 * MIB)
        subject.need("memory")
        code = "x = []\nwhile True: x.append(b'x' * 1_000_000)"
        exit = (await subject.python(code)).exit
        assert (exit.reason, exit.exit_code, exit.signal) == (Reason.OOM_KILLED, 137, 9)
        assert (await subject.link.usage()).oom_kills
        assert await subject.output("echo alive") == "alive"

    async def test_a_child_out_of_memory_is_not_the_programs_end(self, launch: Launcher) -> None:
        subject = await launch(memory=64 * MIB)
        subject.need("memory")
        script = "python3 -c 'x = b\"x\" * 500_000_000'; echo child: $?; exit 7"
        result = await subject.sh(script)
        assert (result.exit.exit_code, result.stdout) == (7, b"child: 137\n")
        assert result.exit.reason is Reason.EXITED

    async def test_memory_within_the_limit_is_fine(self, launch: Launcher) -> None:
        subject = await launch(memory=128 * MIB)
        code = "x = b'x' * 64_000_000; print(len(x))"
        assert (await subject.python(code)).stdout == b"64000000\n"

    async def test_processes(self, launch: Launcher) -> None:
        subject = await launch(processes=24)
        subject.need("processes")
        code = (
            "import os, time\n"
            "made = 0\n"
            "try:\n"
            "    for _ in range(200):\n"
            "        if os.fork() == 0: time.sleep(1000)\n"
            "        made += 1\n"
            "except BlockingIOError: print(made)\n"
        )
        result = await subject.python(code, timeout=5)
        assert 12 <= int(result.stdout or 0) < 24, result

    async def test_open_files(self, launch: Launcher) -> None:
        subject = await launch(open_files=64)
        subject.need("open_files")
        code = (
            "files = []\n"
            "try:\n"
            "    while True: files.append(open('/dev/null'))\n"
            "except OSError as error: print(len(files), error.errno)\n"
        )
        count, number = map(int, (await subject.python(code)).stdout.split())
        assert (count, number) == (61, 24)

    async def test_cpus(self, launch: Launcher) -> None:
        subject = await launch(cpus=0.25)
        subject.need("cpus")
        code = (
            "import time\n"
            "end = time.monotonic() + 1.5\n"
            "while time.monotonic() < end: pass\n"
            "print(time.process_time())\n"
        )
        used = float((await subject.python(code)).stdout)
        assert used < 0.75, f"{used} s of CPU in 1.5 s"

    async def test_one_boxes_limit_is_not_anothers(self, launch: Launcher) -> None:
        greedy, polite = await launch(processes=20), await launch(processes=20)
        greedy.need("processes")
        async with await greedy.start_python(FORK_BOMB) as bomb:
            await until(lambda: self.is_full(greedy, 15), what="the bomb has gone off")
            assert await polite.output("for i in 1 2 3 4 5; do (echo $i); done | wc -l") == "5"
            await greedy.link.kill(bomb.exec_id)

    async def is_full(self, subject: Subject, processes: int) -> bool:
        return ((await subject.link.usage()).processes or 0) >= processes


class TestStress:
    async def test_the_agent_answers_during_a_fork_bomb(self, launch: Launcher) -> None:
        subject = await launch(processes=64)
        subject.need("processes")
        async with await subject.start_python(FORK_BOMB, timeout=60) as bomb:
            await until(lambda: self.many(subject), what="the bomb has gone off", within=15)
            for _ in range(5):
                async with asyncio.timeout(2):
                    await subject.link.ping()
                    await subject.link.usage()
                    await subject.link.execs()
            await self.ends(subject, bomb)
        assert await subject.output("echo alive") == "alive"

    async def test_a_fork_bomb_ends_at_its_timeout(self, launch: Launcher) -> None:
        subject = await launch(processes=64)
        subject.need("processes")
        exit = (await subject.python(FORK_BOMB, timeout=1.0)).exit
        assert exit.reason is Reason.TIMED_OUT
        assert exit.duration_ms < 6000
        await until(lambda: self.empty(subject), what="no process left in the box")
        assert await subject.output("echo alive") == "alive"

    async def many(self, subject: Subject) -> bool:
        return ((await subject.link.usage()).processes or 0) >= 40

    async def empty(self, subject: Subject) -> bool:
        return (await subject.link.usage()).processes in (0, None)

    async def ends(self, subject: Subject, stream: ExecStream) -> None:
        began = time.monotonic()
        assert await subject.link.kill(stream.exec_id)
        assert time.monotonic() - began < 5
        await drain(stream)
        await until(lambda: self.empty(subject), what="no process left in the box")

    @pytest.mark.parametrize("on", ["1", "2"])
    async def test_the_agent_answers_during_a_flood(self, subject: Subject, on: str) -> None:
        async with await subject.start_sh(f"yes >&{on}", timeout=60) as flood:
            await until(lambda: self.flooded(subject), what="a flood of output")
            slowest = 0.0
            for _ in range(20):
                began = time.monotonic()
                await subject.link.ping()
                slowest = max(slowest, time.monotonic() - began)
            assert slowest < 1.0
            assert await subject.output("echo alive") == "alive"
            await self.ends(subject, flood)

    async def flooded(self, subject: Subject) -> bool:
        running = [info for info in await subject.link.execs() if info.running]
        return sum(info.stdout_bytes + info.stderr_bytes for info in running) > 20 * MIB

    async def test_a_memory_hog_does_not_take_the_agent_along(self, launch: Launcher) -> None:
        subject = await launch(memory=64 * MIB)
        subject.need("memory")
        code = "x = []\nwhile True: x.append(b'x' * 1_000_000)"
        for _ in range(3):
            await asyncio.gather(*(subject.python(code) for _ in range(3)))
            assert (await subject.link.ping())["execs_running"] == 0

    async def test_five_hundred_execs_leave_nothing(self, subject: Subject) -> None:
        for _ in range(25):
            await asyncio.gather(*(subject.run("true") for _ in range(20)))
        await until(lambda: self.empty(subject), what="no process left in the box")
        assert (await subject.link.ping())["execs_running"] == 0


class TestUsage:
    async def test_cpu_memory_and_processes_are_measured(self, subject: Subject) -> None:
        before = await subject.link.usage()
        assert before.source
        code = (
            "import time\n"
            "x = b'x' * 50_000_000\n"
            "end = time.process_time() + 0.3\n"
            "while time.process_time() < end: pass\n"
            "print('ready')\n"
            "time.sleep(1000)\n"
        )
        async with await subject.start_python(code) as stream:
            await anext(stream)
            during = await subject.link.usage()
            if during.cpu_ms is not None and before.cpu_ms is not None:
                assert during.cpu_ms >= before.cpu_ms + 250
            if during.memory_bytes is not None:
                assert during.memory_bytes >= 50_000_000
            if during.memory_peak_bytes is not None:
                assert during.memory_peak_bytes >= 50_000_000
            if during.processes is not None:
                assert 1 <= during.processes < 10

    async def test_threads_count_as_processes(self, subject: Subject) -> None:
        """As they do for the limit."""
        code = (
            "import threading, time\n"
            "for _ in range(9): threading.Thread(target=time.sleep, args=(1000,)).start()\n"
            "print('ready')\n"
        )
        async with await subject.start_python(code) as stream:
            await anext(stream)
            during = await subject.link.usage()
            assert during.processes is None or 10 <= during.processes < 20

    async def test_the_disk_is_measured(self, subject: Subject) -> None:
        before = await subject.link.usage()
        await subject.sh("head -c 5000000 /dev/urandom > file; sync; touch 1 2 3 4 5")
        after = await subject.link.usage()
        if before.disk_bytes is None or after.disk_bytes is None:
            pytest.skip("the disk is not measured here")
        assert after.disk_bytes - before.disk_bytes >= 4_900_000
        if before.inodes is not None and after.inodes is not None:
            assert after.inodes - before.inodes == 6

    async def test_a_ping_tells_who_answers(self, subject: Subject) -> None:
        first = await subject.link.ping()
        async with await subject.start("sleep", "1000"):
            second = await subject.link.ping()
        assert second["execs_running"] == 1
        assert second["pid"] == first["pid"]
        assert second["uptime_ms"] >= first["uptime_ms"] >= 0
