"""Runs inside the test machine: an older kernel, cgroup v2 only. One line per check."""

from __future__ import annotations

import asyncio
import shlex
import sys
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from capsule import agentbin
from capsule.link.link import AgentLink
from capsule.model import ExecId, ExecRequest, Limits, SandboxId, SandboxSpec, Template
from capsule.providers.contract import Box, Pausable
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/workspace"}
MIB = 1 << 20


class Machine:
    def __init__(self, box: Box) -> None:
        self.box = box
        self.link = AgentLink(box.connect)
        self.count = 0

    async def sh(self, script: str, timeout: float = 60.0) -> tuple[str, str, str]:
        self.count += 1
        request = ExecRequest(
            argv=("bash", "-c", script), id=ExecId(f"e{self.count}"), env=ENV, timeout=timeout
        )
        done = await self.link.collect(request)
        return str(done[0].reason), done[1].decode(), done[2].decode()


async def programs_run(m: Machine) -> None:
    reason, out, _ = await m.sh("id -u; pwd; cat /proc/self/cgroup")
    assert (reason, out.split()) == ("exited", ["1000", "/workspace", "0::/"]), (reason, out)


async def memory_is_limited(m: Machine) -> None:
    reason, _, _ = await m.sh("exec python3 -c 'x = bytearray(400 << 20)'", 120)
    assert reason == "oom_killed", reason


async def processes_are_limited(m: Machine) -> None:
    _, out, err = await m.sh("for i in $(seq 80); do sleep 300 & done; echo started", 120)
    assert "fork" in err, (out, err)
    await m.link.kill(ExecId(f"e{m.count}"))  # what it left in the background


async def a_fork_bomb_ends_with_its_timeout(m: Machine) -> None:
    reason, _, _ = await m.sh("f() { f | f & }; f; sleep 100", 3)
    assert reason == "timed_out", reason
    await eventually(partial(_nobody_left, m))  # the kernel counts the dead until they are reaped


async def _nobody_left(m: Machine) -> bool:
    return (await m.link.usage()).processes == 0


async def usage_comes_from_cgroup_2(m: Machine) -> None:
    used = await m.link.usage()
    assert used.source == "cgroup2" and used.cpu_ms and used.memory_peak_bytes, used


async def the_disk_is_limited(m: Machine) -> None:
    _, _, err = await m.sh("dd if=/dev/zero of=big bs=1M count=200; rm big", 120)
    assert "No space left" in err, err


async def a_paused_box_uses_no_cpu_and_goes_on(m: Machine) -> None:
    assert isinstance(m.box, Pausable)
    script, busy = "while :; do echo >> ticks; sleep 0.05; done", ExecId(f"e{m.count + 1}")
    ticking = asyncio.create_task(m.sh(script, 600))
    await asyncio.sleep(0)  # it has its number
    await eventually(partial(_lines, m, 3))
    await m.box.pause()
    frozen = list(Path("/sys/fs/cgroup").rglob("*vm1*/cgroup.events"))
    assert any("frozen 1" in path.read_text() for path in frozen), frozen
    before = (await m.link.usage()).cpu_ms
    await asyncio.sleep(1)  # the time in which it would have used some
    assert (await m.link.usage()).cpu_ms == before
    await m.box.resume()
    now = await _count(m)
    await eventually(partial(_lines, m, now + 3))
    await m.link.kill(busy)
    assert (await ticking)[0] == "cancelled"


MAPPED = """
import mmap, os, time
place = mmap.mmap(os.open("d/mapped", os.O_RDWR), 0)
for word in ("one", "two"):
    while not os.path.exists(f"go-{word}"):
        time.sleep(0.02)
    place[:3] = word.encode()
    os.rename(f"go-{word}", f"gone-{word}")
time.sleep(600)
"""


async def a_row_of_saves_tells_what_changed(m: Machine) -> None:
    """By events; and what a program writes through a mapping, which is none."""
    files = "for i in $(seq 100); do echo $i > d/$i; done; printf %09000d 0 > d/mapped"
    await m.sh(f"mkdir d; {files}; sleep 0.1")
    whole, at = await _saved(m, 0.0)
    assert whole.count(b"d/") > 100, len(whole)
    mapping = asyncio.create_task(m.sh(f"exec python3 -c {shlex.quote(MAPPED)}", 600))
    await asyncio.sleep(0)  # it has its number
    busy = ExecId(f"e{m.count}")
    for word in ("one", "two"):
        await m.sh(f"touch go-{word}; until test -e gone-{word}; do sleep 0.02; done; sleep 0.05")
        part, at = await _saved(m, at)
        assert part[:1] == b"o" and part.count(b"d/") == 1 and word.encode() in part, part[:2000]
    part, at = await _saved(m, at)
    assert part[:1] == b"o" and b"d/" not in part, part[:2000]
    await m.link.kill(busy)
    await mapping


async def _saved(m: Machine, since: float) -> tuple[bytes, float]:
    about: dict[str, Any] = {}
    pieces = m.link.save(about, since=since, difference=since > 0, row=True)
    return b"".join([piece async for piece in pieces]), about["at"]


async def _count(m: Machine) -> int:
    return len((await m.sh("cat ticks 2> /dev/null"))[1])


async def _lines(m: Machine, count: int) -> bool:
    return await _count(m) >= count


async def eventually(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await what():  # noqa: ASYNC110 — it asks a box
            await asyncio.sleep(0.1)


CHECKS: tuple[Callable[[Machine], Awaitable[None]], ...] = (
    programs_run,
    memory_is_limited,
    processes_are_limited,
    a_fork_bomb_ends_with_its_timeout,
    usage_comes_from_cgroup_2,
    the_disk_is_limited,
    a_paused_box_uses_no_cpu_and_goes_on,
    a_row_of_saves_tells_what_changed,
)


async def main() -> int:
    base = Path("/var/lib/vm")
    settings = LocalSettings(data_dir=base / "data", run_dir=base / "run", agent=agentbin.find())
    provider = LocalProvider(settings)
    await provider.open()
    found = await provider.probe()
    print("isolation", found.isolation, "unenforced", [u.what for u in found.unenforced])
    limits = Limits(memory=128 * MIB, processes=48, disk=100 * MIB, inodes=2000)
    box = await provider.launch(SandboxId("vm1"), SandboxSpec(Template("bash"), limits))
    machine, failed = Machine(box), 0
    for check in CHECKS:
        try:
            await check(machine)
            print("ok", check.__name__, flush=True)
        except Exception:
            failed += 1
            print("not ok", check.__name__, traceback.format_exc(), flush=True)
    await box.destroy()
    left = [str(p) for p in Path("/sys/fs/cgroup").rglob("vm1*")]
    failed += bool(left)
    print("ok nothing_left" if not left else f"not ok nothing_left {left}")
    await provider.aclose()
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
