"""The pool and reset over real boxes."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from capsule.catalog import load_catalog
from capsule.config import Config
from capsule.errors import GoneError, UnavailableError
from capsule.model import Started
from capsule.providers.registry import make_provider
from capsule.service import CreateRequest, ExecCall, Service
from tests.support import component_missing, eventually

pytestmark = pytest.mark.real

CATALOG = load_catalog(None)
BASH = CreateRequest(template="bash")


@pytest.fixture
def folder(agent_binary: Path) -> Iterator[Path]:
    """Short, for Unix sockets, and open to the users that boxes run as."""
    path = Path(tempfile.mkdtemp(prefix="cs-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Service]:
    settings = {"drain": "delete", "pool_templates": ("bash",), **settings}
    config = Config(data_dir=folder / "d", run_dir=folder / "r", **settings)
    provider = await asyncio.to_thread(make_provider, "local", config, CATALOG)
    service = Service(config, {"local": provider}, CATALOG)
    try:
        await service.open()
    except UnavailableError as error:
        component_missing(f"no sandboxes for the pool's tests: {error.message}")
    try:
        yield service
    finally:
        await service.aclose()


def boxes(folder: Path) -> list[str]:
    return os.listdir(folder / "r" / "boxes")


async def filled(service: Service, count: int) -> None:
    def ready() -> bool:
        return [shelf.ready for shelf in service.pool().shelves] == [count]

    await eventually(ready, what=f"{count} boxes are ready")


async def say(service: Service, id: str, script: str) -> str:
    result = await service.exec(id, ExecCall(("bash", "-c", script)))
    return result.stdout.decode()


async def test_a_warm_sandbox_is_as_any_other(folder: Path) -> None:
    async with serving(folder, pool_min=2) as service:
        await filled(service, 2)
        warm = await service.create(CreateRequest(template="bash", env={"COLOUR": "blue"}))
        cold = await service.create(CreateRequest(template="bash", limits={"inodes": 5000}))
        assert (warm.started, cold.started) == (Started.WARM, Started.COLD)
        look = "echo $COLOUR; pwd; id -u; hostname; ls -A /workspace /tmp; echo hi > f; cat f"
        assert await say(service, warm.id, "echo $COLOUR") == "blue\n"
        assert (await say(service, warm.id, look)).replace("blue", "") == await say(
            service, cold.id, look
        )
        await filled(service, 2)
        assert len(boxes(folder)) == 4
        await service.delete(warm.id)
        await service.delete(cold.id)
        assert len(boxes(folder)) == 2
    assert boxes(folder) == []


async def test_a_hundred_at_once_all_get_one(folder: Path) -> None:
    async with serving(folder, pool_min=4, pool_max=8) as service:
        await filled(service, 4)

        async def one() -> Started | None:
            made = await service.create(BASH)
            assert (await service.exec(made.id, ExecCall(("true",)))).exit.exit_code == 0
            await service.delete(made.id)
            return made.started

        started = await asyncio.gather(*(one() for _ in range(100)))
        assert {Started.WARM, Started.COLD} == set(started)
        (shelf,) = service.pool().shelves
        assert shelf.hits + shelf.misses == 100
        assert shelf.hits == started.count(Started.WARM)
        assert shelf.target == 8
    assert boxes(folder) == []


async def test_reset_leaves_nothing_of_before(folder: Path) -> None:
    async with serving(folder, pool_max=2) as service:
        made = await service.create(BASH)
        before = await say(service, made.id, "readlink /proc/self/ns/mnt /proc/self/ns/pid")
        await say(service, made.id, "echo x > /workspace/a; echo y > /tmp/b; echo z > /dev/shm/c")
        live = await service.start(made.id, ExecCall(("sleep", "1000")))
        await service.exec(made.id, ExecCall(("bash", "-c", "cd /tmp; export X=1"), session="main"))
        again = await service.reset(made.id)
        assert again.id == made.id
        with pytest.raises(GoneError, match="was reset during the call"):
            await live.__anext__()
        await live.aclose()
        assert await say(service, made.id, "find /workspace /tmp /dev/shm -mindepth 1") == ""
        assert "sleep" not in await say(service, made.id, "cat /proc/[0-9]*/comm")
        after = await say(service, made.id, "readlink /proc/self/ns/mnt /proc/self/ns/pid")
        assert not set(before.split()) & set(after.split())
        place = await service.exec(
            made.id, ExecCall(("bash", "-c", "pwd; echo [$X]"), session="main")
        )
        assert place.stdout == b"/workspace\n[]\n"
        await filled(service, 1)
        assert (await service.reset(made.id)).started is Started.WARM
        await filled(service, 1)
        assert len(boxes(folder)) == 2
    assert boxes(folder) == []
