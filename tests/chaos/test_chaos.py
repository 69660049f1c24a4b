"""What was answered holds, whatever happens to the server: one minute of it."""

from __future__ import annotations

import os

import pytest

from tests.chaos.__main__ import report
from tests.chaos.run import Options, run
from tests.support.nursery import Nursery, nursery
from tests.support.users import User

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]

LIED_ABOUT = {
    "audit", "contexts", "execs", "files", "forks", "sandboxes",
    "sessions", "snapshots", "streams", "volumes", "webhooks",
}  # fmt: skip


async def test_what_was_answered_holds_over_a_minute_of_faults(agent_binary: object) -> None:
    with nursery() as own:
        model = await run(own, Options(45, seed=7), mounts=os.getuid() == 0)
    assert model.counts["SIGKILL"] > 3
    assert not model.violations, report(model)
