"""Much at once: a burst of creates, execs without a pause, hostile neighbours."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.faults.calls import create, delete, execute, start
from tests.faults.machine import running
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]

MIB = 1024 * 1024


async def each(count: int, at_once: int, call: object) -> list[httpx.Response]:
    gate = asyncio.Semaphore(at_once)

    async def one(i: int) -> httpx.Response:
        async with gate:
            assert callable(call)
            answer = await call(i)
            assert isinstance(answer, httpx.Response)
            return answer

    return list(await asyncio.gather(*map(one, range(count))))


async def test_200_creates_at_50_in_parallel_and_200_deletes(own_nursery: Nursery) -> None:
    async with running(own_nursery, MAX_SANDBOXES="190") as machine, machine.http() as http:

        async def make(_: int) -> httpx.Response:
            return await http.post("/v1/sandboxes", json={"template": "bash"})

        answers = await each(200, 50, make)
        assert Counter(a.status_code for a in answers) == {201: 190, 429: 10}
        full = next(a for a in answers if a.status_code == 429)
        assert full.json()["error"]["code"] == "capacity"
        assert int(full.headers["retry-after"]) >= 1
        ids = [a.json()["id"] for a in answers if a.status_code == 201]
        assert len(set(ids)) == 190
        results = await asyncio.gather(*(execute(http, id, "echo $((6*7))") for id in ids[::10]))
        assert {r["stdout"] for r in results} == {"42\n"}
        await machine.agree()

        async def end(i: int) -> httpx.Response:
            return await http.delete(f"/v1/sandboxes/{ids[i]}")

        assert {a.status_code for a in await each(190, 50, end)} == {200}
        seen = await machine.agree()
        assert seen.rows == {}


async def test_execs_without_a_pause_leave_no_trace(own_nursery: Nursery) -> None:
    async with running(own_nursery) as machine, machine.http() as http:
        ids = [await create(http) for _ in range(10)]
        keepers = [int(machine.record(id)["keeper"]) for id in ids]
        await hammer(http, ids, 3)
        before = [belongings(pid) for pid in keepers]
        threads = len(os.listdir(f"/proc/{machine.pid}/task"))
        memory = machine.memory()
        await hammer(http, ids, 15)
        after = [belongings(pid) for pid in keepers]
        # A connection of the last exec may be open still, or have been before.
        assert all(now <= was + 2 for now, was in zip(after, before, strict=True)), (before, after)
        assert machine.footprint().zombies == []
        assert len(os.listdir(f"/proc/{machine.pid}/task")) <= threads + 2
        assert machine.memory() - memory < 16 * MIB


async def hammer(http: httpx.AsyncClient, ids: list[str], times: int) -> None:
    async def worker(id: str) -> None:
        for _ in range(times):
            result = await execute(http, id, ["sh", "-c", "echo $$; exit 3"])
            assert (result["exit_code"], result["reason"]) == (3, "exited")

    await asyncio.gather(*(worker(id) for id in ids for _ in range(2)))


def belongings(pid: int) -> int:
    """How many descriptors (if we may see them) and children a keeper has."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    with suppress(PermissionError):
        return len(os.listdir(f"/proc/{pid}/fd")) + len(children)
    return len(children)


HOSTILE = {
    "a fork bomb": ":(){ :|:& };:",
    "processes that stop themselves": "for i in $(seq 60); do (kill -STOP $BASHPID)& done; wait",
    "deaf daemons": 'for i in $(seq 40); do (setsid bash -c \'trap "" TERM HUP INT;'
    " while :; do sleep 1; done' &) ; done; sleep 1000",
    "an output flood": "yes | tr -d '\\n'",
    "a memory hog": "while :; do head -c 600M /dev/zero | tail -n 1 >/dev/null; done",
    "a full disk": "while :; do head -c 900M /dev/zero > /workspace/f$RANDOM; done",
    "a deep tree": "while :; do mkdir d && cd d || exit; done",
    "many files": "i=0; while :; do : > f$((i++)) || sleep 1; done 2>/dev/null",
    "many descriptors": 'for i in $(seq 900); do eval "exec $((i+10))<>/dev/null"; done;'
    " sleep 1000",
    "a busy loop": "while :; do :; done & while :; do :; done",
}


async def test_hostile_sandboxes_beside_polite_ones(own_nursery: Nursery) -> None:
    async with running(own_nursery) as machine, machine.http() as http:
        limits = {"cpus": 0.2, "memory": 64 * MIB, "processes": 64}
        hostile = {what: await create(http, limits=limits) for what in HOSTILE}
        polite = [await create(http) for _ in range(3)]
        for what, script in HOSTILE.items():
            await start(http, hostile[what], ["bash", "-c", script])
        waits = await asyncio.gather(*(politely(http, id) for id in polite))
        assert max(max(each) for each in waits) < 10.0
        assert await machine.health() == 200
        for what, id in hostile.items():
            began = time.monotonic()
            assert await delete(http, id) == 200, what
            assert time.monotonic() - began < 10.0, what
        await machine.agree()
        assert sorted(await machine.listed()) == sorted(polite)


async def politely(http: httpx.AsyncClient, id: str) -> list[float]:
    """Modest programs for some seconds, all of which succeed; how long each took."""
    waits = []
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        began = time.monotonic()
        result = await execute(http, id, "echo $((6 * 7)) > f; cat f")
        waits.append(time.monotonic() - began)
        assert result["stdout"] == "42\n"
    return waits
