"""kill -9 of a server of containers: nothing is left, nothing is lost, no exit is invented.

What is promised of the local provider under kills is held by tests/chaos.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.faults.calls import attempt, delete, took, works
from tests.faults.containers import TRANSPORTS, DockerMachine, containers
from tests.faults.daemon import Daemon
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(180)]

AT_ONCE, POINTS, SEED = 3, 4, 20260727
# Appends to a file of its own, so that a program that ran twice is seen to have done so.
PROGRAM = "echo begun >> {key}; echo said; sleep 0.03; exit 7"


class Killed:
    """The same calls again and again, killed at points drawn from the time that they take."""

    def __init__(self, host: DockerMachine, http: httpx.AsyncClient) -> None:
        self.host = host
        self.http = http
        self.dice = random.Random(SEED)
        self.duration = 0.0

    async def during(self, *calls: Awaitable[Any]) -> list[Any]:
        """What each was answered; None: the server was gone."""

        async def guarded(call: Awaitable[Any]) -> Any:
            with suppress(httpx.TransportError):
                return await call

        tasks = [asyncio.create_task(guarded(call)) for call in calls]
        await asyncio.wait(tasks, timeout=self.dice.uniform(0.0, 1.2) * self.duration)
        os.kill(self.host.pid, signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        assert await self.host.ended() == -signal.SIGKILL
        await self.host.start()
        await self.host.agree(within=30.0)
        return answers

    async def create(self, key: str) -> str:
        body = {"template": "shell", "metadata": {"key": key}}
        headers = {"Idempotency-Key": key}
        answer = await self.http.post("/v1/sandboxes", json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def some(self, round: int) -> list[str]:
        return list(await asyncio.gather(*(self.create(f"{round}-{n}") for n in range(AT_ONCE))))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_creates_and_deletes(own_nursery: Nursery, docker: Daemon, transport: str) -> None:
    async with (
        containers(own_nursery, docker, DOCKER_TRANSPORT=transport) as host,
        host.http() as http,
    ):
        killed = Killed(host, http)
        killed.duration = await took(killed.some(-1))
        for round in range(POINTS):
            keys = [f"{round}-{n}" for n in range(AT_ONCE)]
            answers = await killed.during(*map(killed.create, keys))
            before = list(await host.listed())
            again = [await killed.create(key) for key in keys]
            for answer, id in zip(answers, again, strict=True):
                assert answer in (None, id), "what was created stays"
                assert await works(http, id)
            made = set(await host.listed())
            assert set(again) <= made and set(before) <= made
            assert len(made - set(before)) <= AT_ONCE, "a retry makes no second sandbox"
            ended = await killed.during(*(delete(http, id) for id in again))
            for id, status in zip(again, ended, strict=True):
                there = await works(http, id)
                assert not (there and status == 200), "what was deleted stays so"
                assert await delete(http, id) in ((200,) if there else (404, 410))
            await host.delete_all()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_execs(own_nursery: Nursery, docker: Daemon, transport: str) -> None:
    async with (
        containers(own_nursery, docker, DOCKER_TRANSPORT=transport) as host,
        host.http() as http,
    ):
        killed = Killed(host, http)
        id = await killed.create("home")

        async def run(key: str) -> httpx.Response:
            return await attempt(http, id, PROGRAM.format(key=key), idempotency_key=key)

        killed.duration = await took(run("first"))
        for round in range(POINTS):
            keys = [f"{round}-{n}" for n in range(AT_ONCE)]
            await killed.during(*map(run, keys))
            assert await works(http, id)
            for key in keys:
                again = await run(key)
                body = again.json()
                if again.status_code == 200:
                    told = (body["reason"], body["exit_code"], body["stdout"])
                    assert told == ("exited", 7, "said\n")
                else:
                    assert (again.status_code, body["error"]["details"]["lost"]) == (410, True)
                assert (await attempt(http, id, ["cat", key])).json()["stdout"] == "begun\n"
