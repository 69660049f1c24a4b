"""SIGTERM of a server that deletes its sandboxes; tests/api/test_shutdown.py has the others."""

from __future__ import annotations

import pytest

from tests.faults.calls import create, start
from tests.faults.machine import running
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


async def test_with_drain_delete_nothing_is_left(own_nursery: Nursery) -> None:
    async with running(own_nursery, DRAIN="delete", DRAIN_TIMEOUT="1") as machine:
        async with machine.http() as http:
            for id in [await create(http) for _ in range(5)]:
                await start(http, id, "trap '' TERM; while :; do sleep 1; done")
        assert await machine.stop() == 0
        seen = await machine.agree()
        assert seen.rows == {}
