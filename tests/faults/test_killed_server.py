"""kill -9 of the server at random points: nothing is left, nothing is lost, no exit is invented."""

from __future__ import annotations

import pytest

from tests.faults.acts import (
    Acts,
    Creating,
    Deleting,
    Executing,
    Resetting,
    Uploading,
    killed_repeatedly,
)
from tests.faults.containers import TRANSPORTS, unstarted
from tests.faults.daemon import Daemon
from tests.faults.machine import checked, running
from tests.support.images import PREFIX
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(180)]

SEED = 20260727
ALL = [Creating, Executing, Uploading, Deleting]


@pytest.mark.parametrize("kind", ALL)
async def test_a_server_killed_at_13_points(own_nursery: Nursery, kind: type[Acts]) -> None:
    async with running(own_nursery) as machine, machine.http() as http:
        await killed_repeatedly(machine, http, kind, points=13, seed=SEED)


async def test_a_server_killed_at_13_points_of_resets(own_nursery: Nursery) -> None:
    async with running(own_nursery) as machine, machine.http() as http:
        await killed_repeatedly(machine, http, Resetting, points=13, seed=SEED)


@pytest.mark.parametrize("kind", ALL)
async def test_an_ordinary_users_server_killed_at_3_points(
    user_nursery: Nursery, kind: type[Acts]
) -> None:
    async with running(user_nursery) as machine, machine.http() as http:
        await killed_repeatedly(machine, http, kind, points=3, seed=3)


@pytest.mark.parametrize("kind", [Creating, Executing, Deleting])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_server_of_containers_killed_at_4_points(
    own_nursery: Nursery, docker: Daemon, transport: str, kind: type[Acts]
) -> None:
    async with unstarted(own_nursery, docker, DOCKER_TRANSPORT=transport) as machine:
        machine.template("bash", f"{PREFIX}alpine")
        async with checked(machine), machine.http() as http:
            await killed_repeatedly(machine, http, kind, points=4, seed=SEED)
