"""Shepherds in containers: each serves one exec after the other, and no exec reaches another's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from capsule.errors import NotFoundError
from capsule.model import MIB, Limits, Reason, SandboxId, SandboxSpec, Template
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings
from capsule.testing.harness import Subject, drain, opened, read_until
from tests.support.engine import EngineApi
from tests.support.images import Images

pytestmark = pytest.mark.real


@pytest.fixture(params=["runc", pytest.param("runsc", marks=pytest.mark.timeout(60))])
def runtime(request: pytest.FixtureRequest, engine: EngineApi) -> str:
    if request.param == "runsc":
        request.getfixturevalue("runsc")
    return str(request.param)


@pytest.fixture
async def subject(
    docker_url: str, run_dir: Path, agent_binary: Path, images: Images, runtime: str
) -> AsyncIterator[Subject]:
    settings = DockerSettings(run_dir, run_dir, agent_binary, host=docker_url, pull="never")
    async with opened(DockerProvider(settings)) as provider:
        limits = Limits(disk=16 * MIB, cpus=1.0)
        spec = SandboxSpec(Template("test", image=images.alpine), limits, runtime=runtime)
        yield Subject(await provider.launch(SandboxId("a"), spec))


async def shepherd(subject: Subject) -> int:
    """Of an exec that is over then: the parent of its program."""
    return int(await subject.output("echo $PPID"))


async def test_one_serves_the_next_exec_too(subject: Subject) -> None:
    served = [await shepherd(subject)]
    with pytest.raises(NotFoundError):
        await subject.run("no-such-program")
    large = await subject.run("sh", "-c", "echo $PPID $#", *["x" * 1000] * 40)
    by, count = large.stdout.split()
    assert count == b"39"
    served += [int(by), *[await shepherd(subject) for _ in range(3)]]
    assert len(set(served)) <= 2, "and the one that is made ahead under gVisor"


async def test_who_left_somebody_behind_keeps_its_own(subject: Subject) -> None:
    script = "sleep 1000 >/dev/null 2>&1 & echo $! > victim; echo $PPID"
    left = await subject.sh(script, id=subject.id("left"))
    victim = await subject.pid_in("victim")
    other = await shepherd(subject)
    assert other != int(left.stdout)
    async with await subject.start("sleep", "1000") as stream:
        await subject.link.kill(subject.id("left"))
        assert not await subject.is_alive(victim)
        assert await subject.is_alive(stream.pid)


async def test_a_signal_for_one_that_ended_reaches_nobody(subject: Subject) -> None:
    served = await shepherd(subject)
    async with await subject.start_sh("trap 'exit 3' TERM; echo up; sleep 1000 & wait") as first:
        await read_until(first, b"up")
        await first.signal("TERM")
        await drain(first)
    assert first.exit is not None and first.exit.exit_code == 3
    async with await subject.start_sh("echo $PPID; exec sleep 1000") as second:
        assert int(await read_until(second, b"\n")) != served, "a signal may be under way to it"
        await subject.link.kill(first.exec_id, signal="TERM")
        await subject.link.kill(first.exec_id)
        assert await subject.is_alive(second.pid)


@pytest.mark.parametrize("runtime", ["runc"])
async def test_one_that_dies_takes_its_program_along(subject: Subject, engine: EngineApi) -> None:
    async with await subject.start("sleep", "1000") as stream:
        os.kill(await asyncio.to_thread(parent_of_sleep, engine, subject), signal.SIGKILL)
        await drain(stream)
    assert stream.exit is not None
    assert (stream.exit.reason, stream.exit.signal) == (Reason.SIGNALED, 9)
    assert not await subject.is_alive(stream.pid)
    assert await subject.output("echo still here") == "still here"


def parent_of_sleep(engine: EngineApi, subject: Subject) -> int:
    """As the host numbers it."""
    container = subject.box.handle.data["container"]
    listed = engine.get(f"/containers/{container}/top", ps_args="-eo pid,ppid,comm")
    return next(int(parent) for _, parent, name in listed["Processes"] if name == "sleep")
