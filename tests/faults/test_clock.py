"""Somebody sets the clock of a machine with a running server, by a day either way."""

from __future__ import annotations

import time
from datetime import datetime

import httpx
import pytest

from tests.faults.calls import create, execute, state
from tests.faults.machine import running
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(60)]

DAY = 86400.0


async def is_gone(http: httpx.AsyncClient, id: str) -> bool:
    return (await http.get(f"/v1/sandboxes/{id}")).status_code in (404, 410)


@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forward", "back"])
@pytest.mark.parametrize("killed", [False, True], ids=["running", "restarted"])
async def test_nothing_is_deleted_early_and_nothing_is_kept(
    own_nursery: Nursery, jump: float, killed: bool
) -> None:
    async with running(own_nursery) as machine, machine.http() as http:
        long, brief = await create(http, ttl_ms=60_000), await create(http, ttl_ms=3_000)
        await machine.set_clock(jump)
        if killed:
            await machine.kill()
            machine.how = {"ahead": jump}
            await machine.start()
        assert (await execute(http, long, "echo here"))["stdout"] == "here\n"
        await eventually(lambda: is_gone(http, brief), what="the short one is over")
        assert (await execute(http, long, "echo here"))["stdout"] == "here\n"
        shown = datetime.fromisoformat((await state(http, long))["expires_at"]).timestamp()
        assert abs(shown - (time.time() + jump + 60)) < 30, "what people see moves with the clock"
