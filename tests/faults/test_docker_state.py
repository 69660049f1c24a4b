"""dockerd is killed in the middle of a snapshot, of a create from one, and of volumes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.faults.calls import create, delete, execute, start
from tests.faults.containers import SOONER, TRANSPORTS, DockerMachine, unstarted
from tests.faults.daemon import Daemon
from tests.faults.machine import checked
from tests.faults.test_docker_daemon import COUNTING, goes_on
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]

LARGE = {"limits": {"disk": 300 << 20}}


@asynccontextmanager
async def tidying(
    nursery: Nursery, docker: Daemon, **settings: str
) -> AsyncIterator[DockerMachine]:
    """A server that looks for what nobody has every second."""
    async with unstarted(nursery, docker, **settings) as host:
        host.how = {"replace": {**SOONER, "capsule.service.reaper:TIDY_EVERY": 1.0}}
        async with checked(host):
            yield host


def layers(host: DockerMachine) -> list[str]:
    """Also those that are being written."""
    return sorted(os.listdir(host.base / "data/docker-layers"))


async def filled(http: httpx.AsyncClient, id: str) -> None:
    done = await execute(http, id, "head -c 157286400 /dev/zero | tr '\\0' x > f; echo kept > g")
    assert (done["exit_code"], done["stderr"]) == (0, ""), done


async def restored(http: httpx.AsyncClient, name: str) -> str:
    answer = await http.post("/v1/sandboxes", json={"snapshot": name, **LARGE})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def snapshot(http: httpx.AsyncClient, id: str, name: str) -> asyncio.Task[httpx.Response]:
    url = f"/v1/sandboxes/{id}/snapshots"
    return asyncio.create_task(http.post(url, json={"name": name}))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_daemon_killed_in_the_middle_of_a_snapshot(
    own_nursery: Nursery, docker: Daemon, transport: str
) -> None:
    docker.restart(live_restore=True, how="kill")
    async with (
        tidying(own_nursery, docker, DOCKER_TRANSPORT=transport) as host,
        host.http() as http,
    ):
        id = await create(http, template="shell", **LARGE)
        await filled(http, id)
        counting = await start(http, id, COUNTING)
        saving = snapshot(http, id, "one")
        await eventually(lambda: layers(host) != [], what="it to begin")
        docker.kill()
        answer = await saving
        # All or nothing. By its socket the agent itself tells it: the Engine is not needed.
        expected = {(201, 1)} if transport == "socket" else {(503, 0)}
        assert (answer.status_code, len(layers(host))) in expected, answer.text
        docker.start(live_restore=True)
        await host.agree(within=20.0)
        await goes_on(http, id, counting)
        assert (await snapshot(http, id, "two")).status_code == 201
        other = await restored(http, "two")
        assert (await execute(http, other, "cat g; wc -c < f"))["stdout"] == "kept\n157286400\n"
        for name in ("one", "two"):
            await http.delete(f"/v1/snapshots/{name}")
        for each in (id, other):
            assert await delete(http, each) == 200
        await eventually(lambda: layers(host) == [], what="the layers to go", within=15)


async def test_volumes_of_a_daemon_that_is_down(own_nursery: Nursery, docker: Daemon) -> None:
    async with tidying(own_nursery, docker) as host, host.http() as http:
        id = await create(http, template="shell")
        assert (await http.post("/v1/volumes", json={"name": "old"})).status_code == 201
        docker.kill()
        refused = await http.post("/v1/volumes", json={"name": "new"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert (await http.delete("/v1/volumes/old")).status_code == 503
        docker.start()
        await host.agree(within=20.0)  # no volume is left
        assert (await http.get("/v1/volumes")).json()["volumes"] == []
        wish = [{"name": "new", "path": "/workspace/data"}]
        assert (await http.post("/v1/volumes", json={"name": "new"})).status_code == 201
        user = await create(http, template="shell", volumes=wish)
        await execute(http, user, "echo x > data/f")
        assert await delete(http, user) == 200
        assert (await http.delete("/v1/volumes/new")).status_code in (200, 204)
        await delete(http, id)
