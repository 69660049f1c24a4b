"""Memory of the whole machine, or of the container that Capsule runs in: have a neighbour lose it.

Without memory cgroups of its own, as an ordinary user has it: server and sandboxes are together in
one that is too small for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from capsule.providers.local import cgroups
from tests.escape.attempt import ALONE, scenario
from tests.escape.conftest import Cell, agent_for_all
from tests.escape.machine import Sandbox, driver_of, system_python
from tests.support import wait_for
from tests.support.users import User, ordinary_user

pytestmark = [
    pytest.mark.real,
    pytest.mark.serial,
    pytest.mark.needs("root"),
    pytest.mark.needs("cgroup"),
]

IDLE = """
import signal, sys
sys.stdin.readline()
held = bytearray(24 << 20)
for at in range(0, len(held), 4096): held[at] = 1
open("up", "w").close()
signal.pause()
"""

# Each of its processes is smaller than the one that it is to take the place of.
MANY = """
import os, signal, sys, time
sys.stdin.readline()
try: open("/proc/self/oom_score_adj", "w").write("0")
except OSError: pass
for _ in range(110):
    try: pid = os.fork()
    except OSError: break
    if pid == 0:
        held = bytearray(3 << 20)
        for at in range(0, len(held), 4096): held[at] = 1
        signal.pause()
time.sleep(2)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(0, signal.SIGTERM)
"""


class Memory:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """How often the kernel has ended somebody in it."""
        names = [self.folder / name for name in ("memory.events", "memory.oom_control")]
        text = next(name for name in names if name.exists()).read_text()
        found = re.search(r"^oom_kill (\d+)", text, re.M)
        return int(found[1]) if found else 0


@contextmanager
def little_memory(mib: int) -> Iterator[Memory]:
    layout = cgroups.find_here()
    v2 = layout.unified if layout.version == 2 else None
    folder = (v2 or layout.points["memory"]) / f"capsule-test-{os.getpid()}"
    folder.mkdir()
    try:
        name = "memory.max" if v2 else "memory.limit_in_bytes"
        (folder / name).write_text(str(mib << 20))
        yield Memory(folder)
    finally:
        wait_for(lambda: not (folder / "cgroup.procs").read_text(), what="its processes end")
        folder.rmdir()


@scenario(
    "neighbours-memory",
    "have the kernel end a neighbour's idle interpreter by many small processes of one's own",
    proof=ALONE,
    cells=("namespaces-user", "landlock-user"),
)
def test_the_kernel_ends_who_takes_the_memory(
    cell: Cell, capsule_for_all: tuple[str, list[str]], agent_binary: Path
) -> None:
    limits: dict[str, Any] = {"memory": 512 << 20, "processes": 128}
    with little_memory(400) as memory, ordinary_user(*capsule_for_all) as user:
        with driver_of(user, user, agent_for_all(agent_binary, user)) as driver:
            memory.take(driver.pid)
            driver.ask("open", cell.level)
            with driver.box(cell.level, **limits) as one, driver.box(cell.level, **limits) as other:
                other.send("python3", "-c", IDLE, id="idle", input="\n", timeout=0.0)
                wait_for(lambda: _is_up(other), what="the neighbour's interpreter is up")
                one.exec("python3", "-c", MANY, input="\n")
                assert memory.kills() > 0, "there was enough for all"
                assert other.ask("kill", "idle")["running"], "the neighbour's has ended"
                assert one.answers() and other.answers()


def _is_up(sandbox: Sandbox) -> bool:
    return any(name.endswith("up") for name in sandbox.ask("list", "/workspace")["names"])


def test_it_works_outside(peer: User) -> None:
    """The largest process is not of the user who takes the memory."""
    with little_memory(340) as memory:
        idle, many = (
            peer.popen(system_python(), "-c", code, stdin=-1, start_new_session=True)
            for code in (IDLE, MANY)
        )
        try:
            for process in (idle, many):
                memory.take(process.pid)
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                wait_for(lambda: (peer.home / "up").exists(), what="the idle one is up")
            many.wait(15)
            assert memory.kills() > 0 and idle.poll() is not None
        finally:
            for process in (idle, many):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.communicate()
