"""dockerd is killed, started again, or not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest

from tests.faults.calls import (
    attempt,
    begun,
    create,
    delete,
    execute,
    finished,
    refused,
    start,
    state,
)
from tests.faults.containers import TRANSPORTS, containers, unstarted
from tests.faults.daemon import Daemon
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(150)]

COUNTING = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done"


def make(http: httpx.AsyncClient, **body: Any) -> Awaitable[httpx.Response]:
    return http.post("/v1/sandboxes", json={"template": "shell", "provider": "docker", **body})


async def counted(http: httpx.AsyncClient, id: str, exec_id: str) -> int:
    """How far the program has come. Not a number is missing, none comes twice."""
    told = await finished(http, id, exec_id)
    whole = told["stdout"].rpartition("\n")[0].split()
    assert [int(n) for n in whole] == list(range(1, len(whole) + 1))
    return len(whole)


async def goes_on(http: httpx.AsyncClient, id: str, exec_id: str) -> None:
    before = await counted(http, id, exec_id)

    async def further() -> bool:
        return await counted(http, id, exec_id) > before

    await eventually(further, what="the program goes on")


@pytest.mark.parametrize("live_restore", [True, False], ids=["live-restore", "plain"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_daemon_killed_while_programs_run(
    own_nursery: Nursery, docker: Daemon, transport: str, live_restore: bool
) -> None:
    if live_restore:
        docker.restart(live_restore=True, how="kill")
    async with (
        containers(own_nursery, docker, DOCKER_TRANSPORT=transport) as host,
        host.http() as http,
    ):
        calls = (create(http, template="shell") for _ in range(3))
        kept, ended, busy = await asyncio.gather(*calls)
        counting = await start(http, kept, COUNTING)
        waiting = asyncio.create_task(attempt(http, busy, "touch begun; sleep 3; echo done"))
        await eventually(lambda: counted(http, kept, counting), what="it counts")
        await eventually(lambda: begun(http, busy), what="it has begun")
        docker.kill()

        error = await refused(make(http))
        assert "does not answer" in error["message"] and "start it" in error["hint"]
        await refused(http.delete(f"/v1/sandboxes/{ended}"))
        if transport == "engine":
            assert "does not answer" in (await refused(attempt(http, kept, "true")))["message"]
            assert "does not answer" in (await refused(waiting))["message"]
        else:
            assert (await execute(http, kept, "echo fine"))["stdout"] == "fine\n"
            assert (await waiting).json()["stdout"] == "done\n"
        assert await host.health() == 200

        docker.start(live_restore=live_restore)
        await host.agree(within=20.0)
        states = await host.listed()
        assert ended not in states, "the delete was carried out in the end"
        if live_restore:
            assert states == {kept: "running", busy: "running"}
            await goes_on(http, kept, counting)
            assert len(host.relays(kept)) == (transport == "engine"), "the old one has ended"
        else:
            assert states == {kept: "failed", busy: "failed"}
            assert (await state(http, kept))["reason"]
            assert (await attempt(http, kept, "true")).status_code == 410
        assert await delete(http, await create(http, template="shell")) == 200


@pytest.mark.timeout(180)  # the Engine is started five times, beside other tests slowly
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_daemon_killed_during_creates_and_deletes(
    own_nursery: Nursery, docker: Daemon, transport: str
) -> None:
    """At five moments; what was being made or removed is there or gone when it is back."""
    async with (
        containers(own_nursery, docker, DOCKER_TRANSPORT=transport) as host,
        host.http() as http,
    ):
        began = time.monotonic()
        assert await delete(http, await create(http, template="shell")) == 200
        duration = time.monotonic() - began
        for part in range(5):
            leaving = await create(http, template="shell")
            calls = [
                asyncio.ensure_future(make(http)),
                asyncio.ensure_future(make(http)),
                asyncio.ensure_future(http.delete(f"/v1/sandboxes/{leaving}")),
            ]
            await asyncio.wait(calls, timeout=duration * part / 5)
            docker.kill()
            answers = [await call for call in calls]
            assert {answer.status_code for answer in answers} <= {200, 201, 503}, answers
            docker.start()
            await host.agree(within=20.0)
            await host.delete_all()
        assert docker.api.containers() == []


async def test_a_server_whose_daemon_is_down_says_so_and_does_not_start(
    own_nursery: Nursery, docker: Daemon
) -> None:
    async with unstarted(own_nursery, docker) as host:
        docker.kill()
        host.spawn()
        assert await host.ended() != 0
        assert f"the Docker Engine does not answer at {docker.url}" in host.log()
        assert "systemctl start docker" in host.log()
        assert "Traceback" not in host.log()


@pytest.mark.parametrize("live_restore", [True, False], ids=["live-restore", "plain"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_server_starts_without_the_daemon_of_some_sandboxes(
    own_nursery: Nursery, docker: Daemon, transport: str, live_restore: bool
) -> None:
    """They are out of reach, and taken up when it is back; the others can be used at once."""
    if live_restore:
        docker.restart(live_restore=True, how="kill")
    async with (
        containers(own_nursery, docker, DOCKER_TRANSPORT=transport, PROVIDER="local") as host,
        host.http() as http,
    ):
        local = await create(http)
        id = await create(http, template="shell", provider="docker")
        counting = await start(http, id, COUNTING)
        await host.kill()
        docker.kill()
        began = time.monotonic()
        await host.start()
        assert time.monotonic() - began < 10.0
        assert (await execute(http, local, "echo fine"))["stdout"] == "fine\n"
        assert "does not answer" in (await refused(make(http)))["message"]
        await refused(attempt(http, id, "true"))
        docker.start(live_restore=live_restore)

        async def settled() -> str | None:
            answer = await attempt(http, id, "true")
            found = {200: "usable", 410: "gone"}
            return found.get(answer.status_code)

        told = await eventually(settled, what="it is usable, or known to be gone")
        assert told == ("usable" if live_restore else "gone")
        if live_restore:
            await goes_on(http, id, counting)
        await host.agree()
