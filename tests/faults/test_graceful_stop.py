"""SIGTERM while twenty execs and five terminals are under way."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.faults.calls import attempt, create, execute, finished, start
from tests.faults.machine import Machine, running
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


async def until_closed(socket: ClientConnection) -> ConnectionClosed:
    try:
        while True:
            await socket.recv()
    except ConnectionClosed as closed:
        return closed


async def terminal(machine: Machine, id: str, name: str) -> ClientConnection:
    url = f"ws://127.0.0.1:{machine.port}/terminal/{id}?session={name}"
    return await connect(url, proxy=None)


async def says(socket: ClientConnection, text: str, wanted: str) -> None:
    await socket.send(text)
    heard = ""
    async with asyncio.timeout(10):
        while wanted not in heard:
            heard += str(await socket.recv())


async def refused(http: httpx.AsyncClient) -> httpx.Response | None:
    answer = await http.post("/v1/sandboxes", json={"template": "bash"})
    return answer if answer.status_code != 201 else None


async def test_sigterm_during_20_execs_and_5_terminals(own_nursery: Nursery) -> None:
    async with running(own_nursery, DRAIN_TIMEOUT="4") as machine, machine.http() as http:
        ids = [await create(http) for _ in range(4)]
        short = [asyncio.create_task(attempt(http, ids[i % 4], slow(i, 1))) for i in range(10)]
        long = [asyncio.create_task(attempt(http, ids[i % 4], slow(i, 8))) for i in range(10, 20)]
        shells = [await terminal(machine, ids[0], f"s{n}") for n in range(5)]
        for n, shell in enumerate(shells):
            await says(shell, f"MARK=word{n}; echo set-$((40 + 2))\n", "set-42")
        closings = [asyncio.create_task(until_closed(shell)) for shell in shells]
        await eventually(lambda: all_begun(http, ids), what="20 execs run")

        os.kill(machine.pid, signal.SIGTERM)
        answer = await eventually(lambda: refused(http), what="creates are refused")
        assert answer is not None
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert [r.json()["stdout"] for r in await asyncio.gather(*short)] == [
            f"{i}\n" for i in range(10)
        ]
        assert {r.status_code for r in await asyncio.gather(*long)} == {503}
        codes = [closed.rcvd and closed.rcvd.code for closed in await asyncio.gather(*closings)]
        assert codes == [1012] * 5
        assert await machine.ended() == 0
        await machine.agree()

        await machine.start()
        await machine.agree()
        await what_was_cut_goes_on(http, ids)
        for n in range(5):
            async with await terminal(machine, ids[0], f"s{n}") as shell:
                await says(shell, "echo still-$MARK\n", f"still-word{n}")


def slow(i: int, seconds: int) -> str:
    return f"echo {i} >> begun; sleep {seconds}; echo {i}"


async def all_begun(http: httpx.AsyncClient, ids: list[str]) -> bool:
    texts = [(await execute(http, id, "cat begun; true"))["stdout"] for id in ids]
    return len("".join(texts).split()) == 20


async def what_was_cut_goes_on(http: httpx.AsyncClient, ids: list[str]) -> None:
    """Execs that were cut off are found by a later server, with their own ends."""
    ends: list[str] = []
    for id in ids:
        listed = (await http.get(f"/v1/sandboxes/{id}/execs")).json()["execs"]
        for each in listed:
            if "sleep 8" not in each["cmd"][-1]:
                continue
            ended = await end_of(http, id, each["exec_id"])
            assert (ended["exit"]["reason"], ended["exit"]["exit_code"]) == ("exited", 0)
            ends.append(ended["stdout"])
    assert sorted(ends) == sorted(f"{i}\n" for i in range(10, 20))


async def end_of(http: httpx.AsyncClient, id: str, exec_id: str) -> dict[str, Any]:
    async def over() -> bool:
        return (await finished(http, id, exec_id))["exit"] is not None

    await eventually(over, what="it ends")
    return await finished(http, id, exec_id)


async def test_with_drain_delete_nothing_is_left(own_nursery: Nursery) -> None:
    async with running(own_nursery, DRAIN="delete", DRAIN_TIMEOUT="1") as machine:
        async with machine.http() as http:
            for id in [await create(http) for _ in range(5)]:
                await start(http, id, "trap '' TERM; while :; do sleep 1; done")
        assert await machine.stop() == 0
        seen = await machine.agree()
        assert seen.rows == {}
