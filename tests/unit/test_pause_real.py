"""Pausing real boxes: nothing moves, nothing is lost, and what is asked meanwhile is answered."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import CapsuleError, GoneError, WrongStateError
from capsule.model import Reason, State
from capsule.service import CreateRequest, ExecCall, Service
from capsule.service.pool import Pool
from tests.support import eventually
from tests.unit.test_service_real import boxes, folder, keeper, serving

pytestmark = pytest.mark.real
__all__ = ["folder"]

COUNTING = "i=0; while :; do i=$((i+1)); echo $i > n; done"


def sh(text: str, **options: object) -> ExecCall:
    return ExecCall(("sh", "-c", text), **options)  # type: ignore[arg-type]


async def count(service: Service, id: str) -> int:
    async with service.files(id).read("n") as reader:
        return int(b"".join([chunk async for chunk in reader]) or b"0")


async def cpu(service: Service, id: str) -> float:
    """As its agent tells, which is not paused."""
    link = service._sandboxes.find(id).link
    assert link is not None
    return (await link.usage()).cpu_ms or 0.0


async def counting(service: Service, **options: object) -> str:
    id = (await service.create(CreateRequest("bash", **options))).id  # type: ignore[arg-type]
    async with await service.start(id, sh(COUNTING, timeout=600)):
        await eventually(lambda: _beyond(service, id, 10), what="its loop to count")
    return id


async def stands_still(service: Service, id: str) -> None:
    before = await cpu(service, id)
    await asyncio.sleep(0.3)  # the time in which its programs would have used some
    assert await cpu(service, id) - before < 30


async def _beyond(service: Service, id: str, than: int) -> bool:
    try:
        return await count(service, id) > than
    except (CapsuleError, ValueError):
        return False


async def test_nothing_moves_while_it_is_paused_and_all_goes_on_after(folder: Path) -> None:
    async with serving(folder) as service:
        id = await counting(service)
        assert (await service.pause(id)).state is State.PAUSED
        with pytest.raises(WrongStateError, match="is paused"):
            await service.exec(id, sh("true"))
        with pytest.raises(WrongStateError):
            await service.files(id).stat("n")
        await stands_still(service, id)
        assert (await service.pause(id)).state is State.PAUSED
        assert (await service.resume(id)).state is State.RUNNING
        first = await count(service, id)
        await eventually(lambda: _beyond(service, id, first), what="its loop to go on")
        assert (await service.exec(id, sh("echo here"))).stdout == b"here\n"


async def test_a_fork_bomb_is_paused_too(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id
        bomb = "while :; do sh -c 'sh -c true & sh -c true' & sleep 0.001; done"
        async with await service.start(id, sh(bomb, timeout=600)):
            await service.pause(id)
            await stands_still(service, id)
            await service.delete(id)
        assert boxes(folder) == []


async def test_the_timeout_of_an_exec_stands_still_with_it(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id
        script = "echo 1 > n; until [ -e go ]; do sleep 0.05; done"
        running = asyncio.create_task(service.exec(id, sh(script, timeout=2.0)))
        await eventually(lambda: _beyond(service, id, 0), what="it to run")
        await service.pause(id)
        await asyncio.sleep(2.1)  # longer than its timeout
        assert not running.done()
        await service.resume(id)
        await service.files(id).write("go", b"")
        assert (await running).exit.reason is Reason.EXITED


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "its-keeper-killed"])
async def test_a_paused_one_is_deleted_completely(folder: Path, killed: bool) -> None:
    async with serving(folder) as service:
        id = await counting(service)
        record = service._sandboxes.find(id)
        groups = [Path(each) for each in (record.handle or {}).get("cgroups", ())]
        await service.pause(id)
        if killed:
            os.kill(keeper(folder, id), signal.SIGKILL)
        await service.delete(id)
        assert boxes(folder) == [] and not any(group.exists() for group in groups)
        with pytest.raises(GoneError):
            await service.resume(id)


async def test_a_pause_of_files_whose_caller_leaves_loses_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer that its other box begins from is not dropped under it."""
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id
        await service.exec(id, sh("echo kept > notes"))
        before = boxes(folder)
        real, begun, left = Pool.obtain, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any, **options: Any) -> Any:
            begun.set()
            await left.wait()
            return await real(*args, **options)

        monkeypatch.setattr(Pool, "obtain", slow)
        pausing = asyncio.create_task(service.pause(id, memory=False))
        await begun.wait()
        pausing.cancel()
        asyncio.get_running_loop().call_soon(left.set)
        with pytest.raises(asyncio.CancelledError):
            await pausing
        await service.snapshots.sweep()
        assert len(boxes(folder)) == 1 and boxes(folder) != before
        if service._sandboxes.find(id).state is State.PAUSED:
            await service.resume(id)
        assert (await service.exec(id, sh("cat notes"))).stdout == b"kept\n"
