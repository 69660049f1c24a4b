"""The pool and reset over containers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from capsule.config import Config
from capsule.model import MIB, Limits, Started, Template
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings
from capsule.service import CreateRequest, ExecCall, Service
from capsule.testing.harness import until
from tests.support import eventually
from tests.support.engine import PATIENCE
from tests.support.images import Images

pytestmark = pytest.mark.real

SH = CreateRequest(template="sh")


@asynccontextmanager
async def serving(provider: DockerProvider, image: str, folder: Path) -> AsyncIterator[Service]:
    limits = Limits(memory=128 * MIB, disk=16 * MIB)
    catalog = {"sh": Template("sh", image=image, limits=limits, shell=("/bin/sh",))}
    settings: dict[str, Any] = {"drain": "delete", "pool_min": 1, "pool_templates": ("sh",)}
    config = Config(data_dir=folder / "d", run_dir=folder / "r", provider="docker", **settings)
    async with Service(config, {"docker": provider}, catalog) as service:
        yield service


async def filled(service: Service) -> None:
    await eventually(
        lambda: service.pool().shelves[0].ready == 1, what="a container is ready", within=30
    )


async def only(provider: DockerProvider, count: int) -> bool:
    return len([handle async for handle in provider.owned()]) == count


def processes(argument: str) -> list[int]:
    """Of this host, containers' included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


async def say(service: Service, id: str, script: str) -> str:
    return (await service.exec(id, ExecCall(("sh", "-c", script)))).stdout.decode()


@pytest.mark.timeout(120)
async def test_a_ready_container_is_taken_and_exchanged(
    docker_url: str, images: Images, run_dir: Path, agent_binary: Path
) -> None:
    settings = DockerSettings(
        run_dir, run_dir, agent_binary, host=docker_url, patience=PATIENCE, pull="never"
    )
    provider = DockerProvider(settings)
    async with serving(provider, images.alpine, run_dir) as service:
        await filled(service)
        made = await service.create(SH)
        assert made.started is Started.WARM
        await say(service, made.id, "echo x > file; echo y > /tmp/file")
        marked = str(time.time_ns())
        left = await service.start(made.id, ExecCall(("sleep", marked)))
        await left.aclose()
        await filled(service)
        assert await asyncio.to_thread(processes, marked) != []
        assert (await service.reset(made.id)).started is Started.WARM
        assert await asyncio.to_thread(processes, marked) == []
        assert await say(service, made.id, "ls -A /workspace /tmp | grep file; :") == ""
        assert await service.execs(made.id) != []  # only what ran since
        assert [x.id for x in await service.execs(made.id) if x.running] == []
        await filled(service)
        await until(lambda: only(provider, 2), what="the old container to go")
        await service.delete(made.id)
        again = await asyncio.gather(*(service.create(SH) for _ in range(4)))
        assert {sandbox.started for sandbox in again} == {Started.WARM, Started.COLD}
        assert service.pool().memory_bytes <= service.pool().max_memory_bytes
        for sandbox in again:
            assert await say(service, sandbox.id, "echo on") == "on\n"
