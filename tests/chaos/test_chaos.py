"""What was answered holds, whatever happens to the server: one minute of it."""

from __future__ import annotations

import os

import pytest

from tests.chaos.__main__ import report
from tests.chaos.model import KINDS
from tests.chaos.run import Options, run
from tests.support.nursery import nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]


async def test_what_was_answered_holds_over_a_minute_of_faults(agent_binary: object) -> None:
    disks = os.getuid() == 0
    with nursery() as own:
        model = await run(own, Options(60, seed=7), mounts=disks)
    assert not model.violations, report(model)
    faults = {"kill", "kill_while_starting", "stop", "kill_keeper", "kill_keeper_while_down"}
    faults |= {"fill_disk"} if disks else set()
    assert faults <= model.counts.keys(), report(model)


async def test_a_model_that_was_lied_to_notices_each_kind_of_lie(agent_binary: object) -> None:
    """So the other test can fail. It takes no longer than to tell some lies of each kind."""
    with nursery() as own:
        model = await run(own, Options(150, seed=1, clients=4, lies=True), mounts=False)
    assert {violation.kind for violation in model.violations} == set(KINDS), report(model)
