"""A server that has little: 256 file descriptors, or 256 MiB of memory."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.faults.calls import attempt, create, delete, execute
from tests.faults.machine import Machine, checked, machine
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]

MIB = 1024 * 1024
BUSY = {429, 503, 507}
MEMORY_CGROUPS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]  # version 1, version 2
LIMITS = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"]


@asynccontextmanager
async def crowd(port: int, size: int) -> AsyncIterator[None]:
    """Connections that say nothing."""
    made: list[asyncio.StreamWriter] = []
    try:
        for _ in range(size):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(2):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                made.append(writer)
        yield
    finally:
        for writer in made:
            writer.close()


async def status_of(call: asyncio.Task[httpx.Response]) -> int:
    try:
        return (await call).status_code
    except httpx.TransportError:
        return 0  # not accepted, or closed before an answer: there was no descriptor for it


async def test_a_server_with_256_descriptors(own_nursery: Nursery) -> None:
    async with machine(own_nursery) as host:
        host.how = {"nofile": 256}
        async with checked(host):
            async with host.http() as http:
                ids = [await create(http) for _ in range(3)]
                async with crowd(host.port, 300):
                    await eventually(lambda: host.descriptors() >= 240, what="it has none left")
                    calls = [asyncio.create_task(attempt(http, ids[0], "true")) for _ in range(60)]
                    calls += [
                        asyncio.create_task(http.post("/v1/sandboxes", json={"template": "bash"}))
                        for _ in range(20)
                    ]
                    seen = Counter([await status_of(call) for call in calls])
                assert set(seen) <= {0, 200, 201, *BUSY}, seen
                await eventually(lambda: answers(host), what="it answers again")
                for id in ids:
                    assert (await execute(http, id, "echo fine"))["stdout"] == "fine\n"
                assert await delete(http, await create(http)) == 200


async def answers(host: Machine) -> bool:
    with suppress(httpx.TransportError):
        return await host.health() == 200
    return False


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """For the server; its sandboxes' programs have their own."""
    parent = next(p for p in MEMORY_CGROUPS if (p / "cgroup.procs").exists())
    group = parent / f"capsule-test-{os.getpid()}"
    group.mkdir()
    try:
        names = [name for name in LIMITS if (group / name).exists()]
        assert names, f"the memory controller is not handed down in {parent}"
        for name in names:
            with suppress(OSError):  # without an account of swap there is none to limit
                (group / name).write_text(str(limit))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def oom_kills(group: Path) -> int:
    source = next(f for f in ("memory.oom_control", "memory.events") if (group / f).exists())
    return int((group / source).read_text().split("oom_kill ")[1].split()[0])


@pytest.mark.needs("root", "cgroup")
async def test_100_execs_of_64_mib_in_256_mib_of_memory(own_nursery: Nursery) -> None:
    flood = "yes | head -c 67108864"
    with memory_cgroup(256 * MIB) as group:
        async with machine(own_nursery) as host:
            host.how = {"join": [str(group / "cgroup.procs")]}
            async with checked(host), host.http(timeout=100) as http:
                ids = [await create(http, limits={"cpus": 2}) for _ in range(5)]
                gate = asyncio.Semaphore(20)

                async def once(i: int) -> int:
                    async with gate:
                        answer = await attempt(http, ids[i % 5], flood, timeout_ms=60_000)
                    assert len(answer.content) > 10 * MIB or answer.status_code in BUSY
                    if answer.status_code == 200 and i % 10 == 0:  # reading JSON takes its time
                        body = answer.json()
                        assert (body["exit_code"], body["stdout_bytes"]) == (0, 64 * MIB)
                        assert body["stdout_truncated"] is True
                        assert body["stdout"] == "y\n" * (5 * MIB)
                    return answer.status_code

                seen = Counter(await asyncio.gather(*(once(i) for i in range(100))))
                assert set(seen) <= {200, *BUSY}, seen
                assert seen[200] >= 20
                assert oom_kills(group) == 0
                assert host.code() is None
