"""The agent as in E2B's own cloud: started by the root of a whole machine, with all rights.

A second Capsule gives no such root. Here the machine is this one: a process tree with mounts,
processes and network of its own, over a root file system whose changes go with it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from capsule.link import AgentLink
from capsule.model import ExecRequest, Limits, SandboxSpec, Template
from capsule.providers.e2b import plan
from capsule.providers.local import seccomp
from capsule.providers.relay.lines import Lines
from capsule.providers.relay.mux import Mux
from capsule.testing.harness import Subject
from tests.support import eventually
from tests.support.relays import RelayProcess

pytestmark = [pytest.mark.real, pytest.mark.needs("root")]

BOOT = """
set -e
mount -t tmpfs machine "$1"
cd "$1"
mkdir upper work root
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work machine root
mount --rbind /dev root/dev
mount -t proc proc root/proc
mount -t tmpfs machine root/tmp
mount -t tmpfs machine root/var/tmp
chmod 1777 root/tmp root/var/tmp
mkdir -m 700 root/tmp/systemd-private
exec chroot root sleep 1000
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cm-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


class Machine:
    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", "-t", str(pid), "-m", "-p", "-n", "-r", "-w", "bash", "-l", "-c"]

    async def start(self, script: str, **env: str) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._enter, script, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**os.environ, **env}
        )

    async def run(self, script: str, input: bytes = b"") -> str:
        said, complained = await (await self.start(script)).communicate(input)
        assert complained == b""
        return said.decode()


@asynccontextmanager
async def booted(folder: Path) -> AsyncIterator[Machine]:
    command = ["unshare", "-m", "-p", "-n", "-f", "--kill-child", "sh", "-c", BOOT, "sh"]
    process = await asyncio.create_subprocess_exec(*command, str(folder))
    try:
        yield Machine(await eventually(lambda: _first(process.pid), what="a machine that is up"))
    finally:
        process.kill()
        await process.wait()


def _first(unshare: int) -> int:
    """Its pid 1, once that has its root."""
    children = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
    if not children or Path(f"/proc/{children[0]}/comm").read_text() != "sleep\n":
        return 0
    return int(children[0])


@asynccontextmanager
async def with_agent(machine: Machine, agent: Path) -> AsyncIterator[Subject]:
    place = plan.place_of(await machine.run(plan.SCOUT))
    assert (place.mode, place.dir) == ("uid", "/.capsule")
    await machine.run(f"mkdir {place.dir}; cat > {place.agent}", agent.read_bytes())
    spec = SandboxSpec(Template("t"), Limits(processes=40))
    profile = await asyncio.to_thread(seccomp.load_profile, "default", None)
    filter = seccomp.compile_profile(profile, place.machine)
    described = plan.box("rooted", spec, place, filter)
    running = await machine.start(plan.start(place), CAPSULE_BOX=described)
    await machine.run(f"until [ -S {place.dir}/{plan.SOCKET} ]; do sleep 0.02; done")
    mux = await Mux.start(RelayProcess(await machine.start(plan.relay(place)), Lines()))
    try:
        yield Subject(_Box(mux))  # type: ignore[arg-type]  # all that a Subject needs of one
    finally:
        await AgentLink(mux.open).shutdown()
        await mux.aclose()
        await running.communicate()


class _Box:
    def __init__(self, mux: Mux) -> None:
        self.connect = mux.open


async def test_programs_are_not_root_and_the_agent_is_nearly_nobody(
    folder: Path, agent_binary: Path
) -> None:
    async with booted(folder) as machine, with_agent(machine, agent_binary) as subject:
        status = await subject.output("grep -E '^(Uid|CapEff|CapBnd|NoNewPrivs)' /proc/self/status")
        assert status.split()[1:5] == ["1000"] * 4
        assert "0" * 16 in status and "NoNewPrivs:\t1" in status
        assert (await subject.sh("ls /.capsule")).exit.exit_code != 0
        assert (await subject.sh("touch /etc/mine")).exit.exit_code != 0
        caps = await machine.run("grep -h CapEff $(grep -l '^Name:.init$' /proc/[0-9]*/status)")
        assert {int(word, 16) & ~0x1E0 for word in caps.split()[1::2]} == {0}


async def test_its_files_are_saved_without_those_of_others(
    folder: Path, agent_binary: Path
) -> None:
    async with booted(folder) as machine, with_agent(machine, agent_binary) as subject:
        await subject.sh("echo mine > file; echo mine > /tmp/file")
        about: dict[str, int] = {}
        saved = b"".join([piece async for piece in AgentLink(subject.box.connect).save(about)])
        assert b"workspace/file" in saved and b"tmp/file" in saved
        assert b"systemd-private" not in saved
        assert about["left_out"] == 1


async def test_a_timeout_kills_what_went_away(folder: Path, agent_binary: Path) -> None:
    async with booted(folder) as machine, with_agent(machine, agent_binary) as subject:
        request: ExecRequest = subject.request("sh", "-c", "setsid sleep 77 & wait", timeout=0.5)
        assert (await subject.link.collect(request)).exit.timed_out
        assert await machine.run("pgrep -fc '^sleep 77' || true") == "0\n"
