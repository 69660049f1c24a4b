"""Containers that are killed, stopped, paused or removed behind the server's back."""

from __future__ import annotations

import asyncio
import functools
import os
import signal

import httpx
import pytest

from tests.faults.calls import attempt, begun, create, delete, execute, is_failed, state
from tests.faults.containers import SOONER, TRANSPORTS, DockerMachine, containers, unstarted
from tests.faults.daemon import Daemon
from tests.faults.machine import checked
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(90)]


def kill_pid_1(host: DockerMachine, id: str) -> None:
    os.kill(host.pid_of(id), signal.SIGKILL)


def kill_container(host: DockerMachine, id: str) -> None:
    host.docker.api.call("POST", f"/containers/{host.container(id)}/kill")


def stop_container(host: DockerMachine, id: str) -> None:
    host.docker.api.call("POST", f"/containers/{host.container(id)}/stop")


def remove_container(host: DockerMachine, id: str) -> None:
    host.docker.api.remove(host.container(id))


ENDS = [kill_pid_1, kill_container, stop_container, remove_container]


async def several(http: httpx.AsyncClient, count: int) -> list[str]:
    return list(await asyncio.gather(*(create(http, template="shell") for _ in range(count))))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_boxes_ended_from_outside_are_failed_within_5_seconds(
    own_nursery: Nursery, docker: Daemon, transport: str
) -> None:
    async with (
        containers(own_nursery, docker, DOCKER_TRANSPORT=transport) as host,
        host.http() as http,
    ):
        other, *ids = await several(http, 1 + len(ENDS))
        running = [asyncio.create_task(attempt(http, id, "touch begun; sleep 100")) for id in ids]
        for id in ids:
            await eventually(functools.partial(begun, http, id), what="the program runs")
        for id, end in zip(ids, ENDS, strict=True):
            await asyncio.to_thread(end, host, id)
            await eventually(functools.partial(is_failed, http, id), what="failed", within=5.0)
        for id, task in zip(ids, running, strict=True):
            cut = await task
            assert cut.status_code == 503, "an exec in a box that died has no result"
            assert "died during the call" in cut.json()["error"]["message"]
            assert (await state(http, id))["reason"]
            refused = await attempt(http, id, "true")
            assert (refused.status_code, refused.json()["error"]["code"]) == (410, "gone")
        await host.agree()
        assert [await delete(http, id) for id in ids] == [200] * len(ids)
        assert (await execute(http, other, "echo fine"))["stdout"] == "fine\n"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_boxes_ended_while_no_server_runs(
    own_nursery: Nursery, docker: Daemon, transport: str
) -> None:
    async with (
        containers(own_nursery, docker, DOCKER_TRANSPORT=transport) as host,
        host.http() as http,
    ):
        left, paused, *ids = await several(http, 2 + len(ENDS))
        await host.kill()
        for id, end in zip(ids, ENDS, strict=True):
            await asyncio.to_thread(end, host, id)
        pause(host, paused)
        await host.start()
        failed = dict.fromkeys(ids, "failed")
        assert await host.listed() == {left: "running", paused: "running", **failed}
        await host.agree()
        assert (await attempt(http, ids[0], "true")).status_code == 410
        assert (await execute(http, left, "echo fine"))["stdout"] == "fine\n"
        assert await delete(http, paused) == 200


def pause(host: DockerMachine, id: str, verb: str = "pause") -> None:
    host.docker.api.call("POST", f"/containers/{host.container(id)}/{verb}")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_box_paused_from_outside_keeps_nobody_waiting_and_goes_on(
    own_nursery: Nursery, docker: Daemon, transport: str
) -> None:
    """Left like that, it is failed for being silent, and goes."""
    impatient = {"capsule.service.pulse:SILENCE": 4.0, "capsule.service.pulse:BUDGET": 1.0}
    async with unstarted(own_nursery, docker, DOCKER_TRANSPORT=transport) as host:
        host.how = {"replace": {**SOONER, **impatient}}
        async with checked(host), host.http() as http:
            other, back, deleted, silent = await several(http, 4)
            for id in (back, deleted, silent):
                pause(host, id)
            late = asyncio.create_task(attempt(http, back, "echo late"))
            assert (await execute(http, other, "echo fine"))["stdout"] == "fine\n"
            pause(host, back, "unpause")
            assert (await late).json()["stdout"] == "late\n"
            assert await delete(http, deleted) == 200
            await eventually(functools.partial(is_failed, http, silent), what="failed", within=15)
            assert "has not answered for" in (await state(http, silent))["reason"]
            await host.agree()
            assert await delete(http, silent) == 200
            assert (await execute(http, back, "echo fine"))["stdout"] == "fine\n"
