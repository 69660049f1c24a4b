"""A pool that was full when its server ended, one way or the other."""

from __future__ import annotations

import os

import httpx
import pytest

from tests.faults.calls import execute
from tests.faults.machine import Machine, running
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]

READY = 4


async def filled(http: httpx.AsyncClient) -> None:
    async def ready() -> bool:
        shelves = (await http.get("/v1/pool")).json()["shelves"]
        return [shelf["ready"] for shelf in shelves] == [READY]

    await eventually(ready, what=f"{READY} boxes are ready")


def boxes(machine: Machine) -> set[str]:
    return set(os.listdir(machine.base / "run" / "boxes"))


async def create(http: httpx.AsyncClient) -> str:
    made = await http.post("/v1/sandboxes", json={"template": "bash"})
    assert made.json()["started"] == "warm"
    return str(made.json()["id"])


def with_pool(machine: Machine, size: int) -> None:
    machine.env["CAPSULE_POOL_MIN"] = str(size)
    machine.env["CAPSULE_POOL_TEMPLATES"] = "bash"


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_server_that_ends_leaves_no_ready_boxes_and_keeps_sandboxes(
    own_nursery: Nursery, how: str
) -> None:
    async with running(own_nursery) as machine, machine.http() as http:
        assert await machine.stop() == 0
        with_pool(machine, READY)
        await machine.start()
        await filled(http)
        id = await create(http)
        await filled(http)
        await http.post(f"/v1/sandboxes/{id}/reset")
        await filled(http)
        assert len(boxes(machine)) == READY + 1
        if how == "killed":
            await machine.kill()
            assert len(boxes(machine)) >= READY + 1  # they outlive it
        else:
            assert await machine.stop() == 0
            assert len(boxes(machine)) == 1
        with_pool(machine, 0)
        await machine.start()
        assert len(boxes(machine)) == 1
        assert (await execute(http, id, "true"))["exit_code"] == 0
        await http.delete(f"/v1/sandboxes/{id}")
        assert boxes(machine) == set()
