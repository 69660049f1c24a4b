"""A box, its pid 1, its keeper or the launcher is killed behind the server's back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.calls import (
    attempt,
    begun,
    create,
    delete,
    execute,
    finished,
    is_failed,
    start,
    state,
)
from tests.faults.footprint import names_in, processes
from tests.faults.machine import Machine, checked, machine, running
from tests.support import alive, eventually, free_port
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

VICTIMS = ["keeper", "pid 1", "everything"]
LEVELS = ["namespaces", "landlock"]


def victims(host: Machine, id: str, which: str) -> list[int]:
    keeper = int(host.record(id)["keeper"])
    family = [p.pid for p in processes().values() if p.parent == keeper]
    return {"keeper": [keeper], "pid 1": family, "everything": [keeper, *family]}[which]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("which", VICTIMS)
async def test_a_box_that_was_killed_is_failed_within_5_seconds(
    own_nursery: Nursery, which: str, level: str
) -> None:
    async with running(own_nursery, ISOLATION=level) as host, host.http() as http:
        id, other = await create(http), await create(http)
        running_exec = asyncio.create_task(attempt(http, id, "touch begun; sleep 100"))
        await eventually(lambda: begun(http, id), what="the program runs")
        killed = victims(host, id, which)
        assert killed and all(Path(f"/proc/{pid}").exists() for pid in killed)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

        await eventually(lambda: is_failed(http, id), what="failed", within=5.0)
        assert (await state(http, id))["reason"]
        cut = await running_exec
        assert cut.status_code == 503, "an exec in a box that died has no result"
        assert "died during the call" in cut.json()["error"]["message"]
        refused = await attempt(http, id, "true")
        assert (refused.status_code, refused.json()["error"]["code"]) == (410, "gone")
        await host.agree()
        assert await delete(http, id) == 200
        assert (await execute(http, other, "echo fine"))["stdout"] == "fine\n"


async def test_boxes_killed_while_no_server_runs(own_nursery: Nursery) -> None:
    settings = {"AUDIT": "yes", "WEBHOOK_TARGETS": "any"}
    async with running(own_nursery, **settings) as host, host.http() as http:
        target = {"url": f"http://127.0.0.1:{free_port()}", "events": ["sandbox.failed"]}
        hook = (await http.post("/v1/webhooks", json=target)).json()["webhook_id"]
        ids = [await create(http) for _ in range(4)]
        await host.kill()
        for id, which in zip(ids, VICTIMS, strict=False):
            for pid in victims(host, id, which):
                os.kill(pid, signal.SIGKILL)
        await host.start()
        await host.agree()
        failed = dict.fromkeys(ids[:3], "failed")
        assert await host.listed() == {**failed, ids[3]: "running"}
        assert "box was gone" in (await state(http, ids[0]))["reason"]
        assert (await attempt(http, ids[0], "true")).status_code == 410

        async def told() -> bool:
            trail = (await http.get("/v1/audit")).json()["entries"]
            sent = (await http.get(f"/v1/webhooks/{hook}/deliveries")).json()["deliveries"]
            noted = {each["sandbox"] for each in trail if each["what"] == "sandbox.failed"}
            heard = {json.loads(each["body"])["data"]["sandbox_id"] for each in sent}
            return noted == heard == set(failed)

        await eventually(told, what="the trail and the webhook have them")
        for id in failed:
            assert await delete(http, id) == 200


@pytest.mark.slow
async def test_a_box_whose_folder_was_cleared_away_ends(own_nursery: Nursery) -> None:
    """As by something that tidies up /run: no server finds it again, so it ends by itself."""
    async with asyncio.TaskGroup() as group:  # its patience is long, and the same at all levels
        for level in LEVELS:
            group.create_task(ends_when_cleared_away(own_nursery, level))


async def ends_when_cleared_away(nursery: Nursery, level: str) -> None:
    async with running(nursery, ISOLATION=level) as host, host.http() as http:
        id, other = await create(http), await create(http)
        await start(http, id, "sleep 1000")
        family = victims(host, id, "everything")
        shutil.rmtree(host.base / "run/boxes" / id)
        await eventually(lambda: not any(map(alive, family)), what="it ends", within=30)
        answer = await attempt(http, id, "true")
        assert answer.status_code in (410, 503)
        assert await delete(http, id) == 200
        await host.agree()
        assert (await execute(http, other, "echo fine"))["stdout"] == "fine\n"


def forkers(host: Machine, id: str) -> list[int]:
    """Of the box's own processes those that pid 1 started for itself: named like the agent."""
    (init,) = victims(host, id, "pid 1")
    children = [p.pid for p in processes().values() if p.parent == init]
    return [pid for pid in children if "agent" in Path(f"/proc/{pid}/comm").read_text()]


async def test_a_forker_that_was_killed_is_replaced_and_its_orders_are_carried_out(
    own_nursery: Nursery, as_root: None
) -> None:
    async with running(own_nursery) as host, host.http() as http:
        id = await create(http)
        assert (await execute(http, id, "echo 1"))["stdout"] == "1\n"
        for _ in range(3):
            (forker,) = await eventually(lambda: forkers(host, id), what="a forker", within=5.0)
            os.kill(forker, signal.SIGSTOP)
            orders = [asyncio.create_task(execute(http, id, f"echo {n}")) for n in range(5)]
            url = f"/v1/sandboxes/{id}/files/etc/passwd"
            reading = asyncio.create_task(http.get(url))
            await state(http, id)  # what was sent before has arrived
            os.kill(forker, signal.SIGKILL)
            assert [(await order)["stdout"] for order in orders] == [f"{n}\n" for n in range(5)]
            assert (await reading).status_code == 200
            assert (await execute(http, id, "echo 2"))["stdout"] == "2\n"
        await host.agree()


async def test_a_launcher_killed_during_creates_leaves_nothing(own_nursery: Nursery) -> None:
    async with running(own_nursery) as host, host.http() as http:
        for _ in range(3):
            calls = [
                asyncio.create_task(http.post("/v1/sandboxes", json={"template": "bash"}))
                for _ in range(8)
            ]
            await eventually(lambda: names_in(host.base / "run/boxes"), what="launches have begun")
            for launcher in launchers(host):
                os.kill(launcher, signal.SIGKILL)
            answers = await asyncio.gather(*calls)
            assert {answer.status_code for answer in answers} <= {201, 503}
            await create(http)  # with a new launcher
            await host.agree()
            await host.delete_all()


def launchers(host: Machine) -> list[int]:
    """Children of the server that are no zombies."""
    return [p.pid for p in processes().values() if p.parent == host.pid and p.state != "Z"]


async def test_an_agent_that_is_replaced_or_missing(
    own_nursery: Nursery, agent_binary: Path
) -> None:
    """An upgrade while boxes run: they go on, new ones begin with the new one, all can end."""
    async with machine(own_nursery) as host:
        agent = host.base / "agent"
        shutil.copy(agent_binary, agent)
        host.env["CAPSULE_AGENT"] = str(agent)
        async with checked(host), host.http() as http:
            old, swept = await create(http), await create(http)
            agent.unlink()
            os.kill(launchers(host)[0], signal.SIGKILL)
            answer = await http.post("/v1/sandboxes", json={"template": "bash"})
            assert answer.status_code == 503
            assert "the agent cannot be started" in answer.json()["error"]["message"]
            assert (await execute(http, old, "echo fine"))["stdout"] == "fine\n"
            shutil.copy(agent_binary, agent)
            await execute(http, await create(http), "true")
            os.kill(victims(host, swept, "keeper")[0], signal.SIGKILL)
            assert await delete(http, swept) == 200
            assert await delete(http, old) == 200
            await host.agree()


async def test_a_stopped_keeper_keeps_nobody_else_waiting(own_nursery: Nursery) -> None:
    """It is there and silent: calls to it wait or fail, and the others do not notice."""
    async with running(own_nursery) as host, host.http() as http:
        id, other = await create(http), await create(http)
        (keeper,) = victims(host, id, "keeper")
        os.kill(keeper, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(attempt(http, id, "echo late"))
            for _ in range(20):
                assert (await execute(http, other, "echo fine"))["stdout"] == "fine\n"
        finally:
            os.kill(keeper, signal.SIGCONT)
        late = await waiting
        assert late.status_code in (200, 503)


async def test_a_stopped_keeper_can_be_deleted(own_nursery: Nursery) -> None:
    async with running(own_nursery) as host, host.http() as http:
        id = await create(http)
        exec_id = await start(http, id, "sleep 1000")
        assert (await finished(http, id, exec_id))["running"]
        os.kill(victims(host, id, "keeper")[0], signal.SIGSTOP)
        assert await delete(http, id) == 200
        await host.agree()
