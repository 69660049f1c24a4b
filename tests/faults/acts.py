"""What a server does when it is killed: operations, how they are interrupted, how they are judged.

The points are drawn from a fixed seed, as parts of the time an operation takes here, so that they
fall within it on a slow machine as on a fast one.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.api.client import events
from tests.faults.machine import Machine

AT_ONCE = 3
OLD, NEW = b"old" * 100_000, b"new!" * 1_000_000
# Appends to a file of its own, so that a program that ran twice is seen to have done so.
PROGRAM = "echo begun >> {key}; echo said; sleep 0.03; exit 7"
COUNTING = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.02; done"


class Lost(Exception):
    """The server was gone before it answered."""


async def create(http: httpx.AsyncClient, key: str) -> str:
    answer = await http.post(
        "/v1/sandboxes",
        json={"template": "bash", "metadata": {"key": key}},
        headers={"Idempotency-Key": key},
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def execute(http: httpx.AsyncClient, id: str, cmd: Any, key: str = "") -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return await http.post(f"/v1/sandboxes/{id}/execs", json={"cmd": cmd}, headers=headers)


async def works(http: httpx.AsyncClient, id: str) -> bool:
    """It is usable, or it is gone. Anything else fails the test."""
    answer = await execute(http, id, "echo $((6 * 7))")
    if answer.status_code in (404, 410):
        return False
    assert answer.status_code == 200, answer.text
    assert answer.json()["stdout"] == "42\n"
    return True


@dataclass(slots=True)
class Resident:
    """A sandbox that is there all the time, with a program that counts."""

    id: str
    exec_id: str
    seen: str = ""
    offset: int = field(default=0)

    async def counts_on(self, http: httpx.AsyncClient) -> None:
        """Attached where we were: not a number is missing, none comes twice."""
        path = f"/v1/sandboxes/{self.id}/execs/{self.exec_id}/stream?stdout={self.offset}"
        async with http.stream("GET", path) as answer:
            assert answer.status_code == 200
            async for event in events(answer):
                assert event.name == "stdout", event
                self.seen += event.data["data"]
                self.offset = len(self.seen)
                break
        whole = self.seen.rpartition("\n")[0].split()
        assert [int(n) for n in whole] == list(range(1, len(whole) + 1))


async def resident(http: httpx.AsyncClient) -> Resident:
    made = (await http.post("/v1/sandboxes", json={"template": "bash"})).json()["id"]
    body = {"cmd": COUNTING, "timeout_ms": 600_000}
    begun = await http.post(f"/v1/sandboxes/{made}/execs?wait=false", json=body)
    assert begun.status_code == 202, begun.text
    return Resident(made, begun.json()["exec_id"])


async def took(call: Awaitable[Any]) -> float:
    began = time.monotonic()
    await call
    return time.monotonic() - began


async def restart(machine: Machine) -> None:
    """Within 30 seconds: that is what `start` and `agree` grant."""
    await machine.start()
    await machine.agree(within=30.0)


class Acts:
    """One kind of operation: how it is prepared, interrupted, and judged afterwards."""

    def __init__(self, machine: Machine, http: httpx.AsyncClient, dice: random.Random) -> None:
        self.machine = machine
        self.http = http
        self.dice = dice
        self.round = 0
        self.lost = 0  # calls that got no answer
        self.duration = 0.0  # of one, when nothing goes wrong

    def keys(self) -> list[str]:
        self.round += 1
        return [f"{type(self).__name__}-{self.round}-{n}" for n in range(AT_ONCE)]

    async def interrupted(self, *calls: Awaitable[Any]) -> list[Any]:
        """Begin the calls and kill the server; what each returned, or Lost."""

        async def guarded(call: Awaitable[Any]) -> Any:
            try:
                return await call
            except httpx.TransportError:
                self.lost += 1
                return Lost()

        tasks = [asyncio.create_task(guarded(call)) for call in calls]
        await asyncio.sleep(self.dice.uniform(0.0, 1.2) * self.duration)
        os.kill(self.machine.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        assert await self.machine.ended() == -signal.SIGKILL
        return results

    async def prepare(self) -> None:
        """Once, before the first round."""

    async def once(self) -> None:
        raise NotImplementedError


class Creating(Acts):
    async def prepare(self) -> None:
        keys = self.keys()
        made = [create(self.http, key) for key in keys]
        self.duration = await took(asyncio.gather(*made))

    async def once(self) -> None:
        keys = self.keys()
        calls = [create(self.http, key) for key in keys]
        answers = await self.interrupted(*calls)
        await restart(self.machine)
        for key, answer in zip(keys, answers, strict=True):
            before = await self.with_key(key)
            again = await create(self.http, key)
            assert await works(self.http, again)
            assert await self.with_key(key) == [again], "a retry makes no second sandbox"
            assert before in ([], [again])
            if not isinstance(answer, Lost):
                assert answer == again, "what was created stays"
        await self.machine.delete_all()

    async def with_key(self, key: str) -> list[str]:
        answer = await self.http.get("/v1/sandboxes", params={"metadata": f"key={key}"})
        return [each["id"] for each in answer.json()["sandboxes"]]


class Executing(Acts):
    async def prepare(self) -> None:
        self.resident = await resident(self.http)
        calls = [self.exec(key) for key in self.keys()]
        self.duration = await took(asyncio.gather(*calls))

    async def exec(self, key: str) -> httpx.Response:
        return await execute(self.http, self.resident.id, PROGRAM.format(key=key), key)

    async def once(self) -> None:
        keys = self.keys()
        calls = [self.exec(key) for key in keys]
        await self.interrupted(*calls)
        await restart(self.machine)
        assert await works(self.http, self.resident.id)
        await self.resident.counts_on(self.http)
        for key in keys:
            await self.judge(key, await self.exec(key))

    async def judge(self, key: str, again: httpx.Response) -> None:
        """The retry finds the exec that there was, or runs it; it never runs twice."""
        body = again.json()
        if again.status_code == 200:
            assert (body["reason"], body["exit_code"]) == ("exited", 7)
            assert body["stdout"] == "said\n"
        else:
            assert (again.status_code, body["error"]["details"]["lost"]) == (410, True), again.text
        ran = await execute(self.http, self.resident.id, ["cat", key])
        assert ran.json()["stdout"] == "begun\n"


class Uploading(Acts):
    async def prepare(self) -> None:
        self.resident = await resident(self.http)
        self.path = f"/v1/sandboxes/{self.resident.id}/files/workspace/file"
        self.duration = await took(self.upload())

    async def upload(self) -> httpx.Response:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(NEW), 65536):
                yield NEW[start : start + 65536]

        return await self.http.put(self.path, content=pieces())

    async def once(self) -> None:
        assert (await self.http.put(self.path, content=OLD)).status_code == 200
        (answer,) = await self.interrupted(self.upload())
        await restart(self.machine)
        await self.resident.counts_on(self.http)
        read = await self.http.get(self.path)
        assert read.status_code == 200, read.text
        content = read.content
        assert content in (OLD, NEW), f"whole, or as it was: {len(content)} bytes"
        if not isinstance(answer, Lost) and answer.status_code == 200:
            assert content == NEW, "what was acknowledged is there"
        names = await execute(self.http, self.resident.id, ["ls", "-A"])
        assert names.json()["stdout"] == "file\n", "no half of a file is left"
        assert (await self.upload()).status_code == 200


class Deleting(Acts):
    async def prepare(self) -> None:
        self.duration = await took(asyncio.gather(*map(self.delete, await self.some())))

    async def some(self) -> list[str]:
        calls = [create(self.http, key) for key in self.keys()]
        return list(await asyncio.gather(*calls))

    async def delete(self, id: str) -> int:
        return (await self.http.delete(f"/v1/sandboxes/{id}")).status_code

    async def once(self) -> None:
        ids = await self.some()
        calls = [self.delete(id) for id in ids]
        answers = await self.interrupted(*calls)
        await restart(self.machine)
        for id, answer in zip(ids, answers, strict=True):
            there = await works(self.http, id)
            if answer == 200:
                assert not there, "what was deleted stays so"
            assert await self.delete(id) in ((200,) if there else (404, 410))
        assert await self.machine.listed() == {}


class Resetting(Acts):
    """One box or the other: the sandbox works, and what was said to be gone is."""

    async def prepare(self) -> None:
        calls = [create(self.http, key) for key in self.keys()]
        self.ids = list(await asyncio.gather(*calls))
        self.duration = await took(asyncio.gather(*map(self.reset, self.ids)))

    async def reset(self, id: str) -> int:
        return (await self.http.post(f"/v1/sandboxes/{id}/reset")).status_code

    async def once(self) -> None:
        for id in self.ids:
            assert (await execute(self.http, id, "echo x > left")).status_code == 200
        answers = await self.interrupted(*map(self.reset, self.ids))
        await restart(self.machine)
        for id, answer in zip(self.ids, answers, strict=True):
            assert await works(self.http, id), "a reset loses no sandbox"
            left = (await execute(self.http, id, ["cat", "left"])).json()["stdout"]
            assert left in ("x\n", ""), "as it was, or as new"
            if answer == 200:
                assert left == "", "what was reset stays so"


async def killed_repeatedly(
    machine: Machine, http: httpx.AsyncClient, kind: type[Acts], *, points: int, seed: int
) -> None:
    acts = kind(machine, http, random.Random(seed))
    await acts.prepare()
    for _ in range(points):
        await acts.once()
    assert acts.lost or points < 10, "no kill came in time to interrupt anything"
