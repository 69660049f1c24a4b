"""The pool: what it hands out, how large it is, who waits, and that nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from capsule.errors import UnavailableError
from capsule.model import MIB, SandboxId, Started, State
from capsule.service import CreateRequest, ExecCall
from capsule.service import pool as pools
from capsule.service.shelf import WINDOW, Shelf, ShelfStatus
from tests.support import eventually
from tests.unit.service_double import (
    PYTHON,
    Bench,
    FakeBox,
    FakeProvider,
    Gate,
    World,
    bench,
    nothing,
)

TRUE = ExecCall(("true",))


def shelf(b: Bench) -> ShelfStatus:
    (found,) = b.service.pool().shelves
    return found


async def filled(b: Bench, count: int) -> None:
    await until(lambda: [s.ready for s in b.service.pool().shelves] == [count])


def in_pool(b: Bench) -> set[SandboxId]:
    mine = {entry.box_id for entry in b.service._sandboxes.entries.values()}
    return set(b.world.agents) - mine


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition, what="as the test expects it")


async def test_a_create_takes_what_is_ready_and_it_is_replaced(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=2) as b:
        await filled(b, 2)
        ready = in_pool(b)
        made = await b.service.create(CreateRequest(env={"A": "b"}, ttl=77.0, metadata={"m": "1"}))
        assert made.started is Started.WARM
        assert b.service.get(made.id).started is Started.WARM
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        await filled(b, 2)
        assert len(in_pool(b) & ready) == 1
        assert (shelf(b).hits, shelf(b).misses) == (1, 0)
        await b.service.delete(made.id)
        assert len(b.world.agents) == 2
    assert b.world.agents == {}


async def test_it_is_no_sandbox_and_no_orphan(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=2, max_sandboxes=1) as b:
        await filled(b, 2)
        ready = in_pool(b)
        await b.service.reaper.tidy()
        assert in_pool(b) == ready
        assert b.service.list() == []
        assert b.service.stats().sandboxes == {}
        assert (await b.service.create(CreateRequest())).started is Started.WARM


async def test_a_burst_makes_it_grow_and_rest_makes_it_shrink(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_max=6) as b:
        await asyncio.gather(*(b.service.create(CreateRequest()) for _ in range(10)))
        await b.service.create(CreateRequest())
        assert 1 < shelf(b).target <= 6
        await filled(b, shelf(b).target)
        sizes = [shelf(b).target]
        while sizes[-1] > 0:
            b.clock.pass_time(WINDOW + 1)
            await b.service._pool.round()
            sizes.append(shelf(b).target)
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) > 2  # not all at once
        await filled(b, 0)
        await until(lambda: in_pool(b) == set())


async def test_all_shelves_stay_within_the_memory(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=8, pool_memory=3 * FakeBox.idle_memory + MIB) as b:
        await filled(b, 3)
        await b.service._pool.round()
        status = b.service.pool()
        assert (shelf(b).ready, shelf(b).launching) == (3, 0)
        assert status.memory_bytes <= status.max_memory_bytes


@pytest.mark.parametrize("end", ["kill", "mute"])
async def test_a_dead_box_is_never_handed_out(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PATIENCE", 0.05)
    async with bench(tmp_path, pool_min=2) as b:
        await filled(b, 2)
        dead, alive = [s.box.handle.sandbox_id for s in _shelf(b).ready]
        if end == "kill":
            b.world.kill(dead)
        else:
            b.world.agents[dead].mute = True
        made = await b.service.create(CreateRequest())
        assert made.started is Started.WARM
        assert b.service._sandboxes.find(made.id).box_id == alive
        assert shelf(b).discarded == 1
        await until(lambda: dead not in b.world.agents)


async def test_other_limits_than_a_box_can_be_given_start_cold(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=1) as b:
        await filled(b, 1)
        for limits in ({"memory": 64 * MIB}, {"disk": 64 * MIB}):
            made = await b.service.create(CreateRequest(limits=limits))
            assert made.started is Started.COLD
        assert (shelf(b).ready, shelf(b).hits, shelf(b).misses) == (1, 0, 2)


async def test_so_many_launches_at_once_and_the_rest_in_order(tmp_path: Path) -> None:
    gate = Gate()
    async with bench(tmp_path, max_launches=2) as b:
        b.provider.before_launch = gate
        asked = [asyncio.create_task(b.service.create(CreateRequest())) for _ in range(6)]
        await until(lambda: b.service.pool().waiting == 4)
        order = list(b.service._sandboxes.entries)
        assert b.service.pool().launching == 2
        gate.open()
        made = await asyncio.gather(*asked)
        assert [sandbox.state for sandbox in made] == [State.RUNNING] * 6
        assert gate.came == order
        assert (b.service.pool().waiting, b.service.pool().launching) == (0, 0)


async def test_a_shelf_that_cannot_be_filled_is_tried_again_later(tmp_path: Path) -> None:
    async def refuse(id: SandboxId) -> None:
        raise UnavailableError("not now")

    world = World()
    provider = FakeProvider(world)
    provider.before_launch = refuse
    async with bench(tmp_path, world=world, provider=provider, pool_min=1) as b:
        await until(lambda: _shelf(b).failures == 1)
        b.clock.pass_time(2.0)
        await b.service._pool.round()
        await until(lambda: _shelf(b).failures == 2)
        provider.before_launch = nothing
        b.clock.pass_time(5.0)
        await b.service._pool.round()
        await filled(b, 1)
        assert _shelf(b).failures == 0


async def test_boxes_of_a_changed_template_go(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=1) as b:
        await filled(b, 1)
        before = in_pool(b)
        await b.service._pool.let_go(PYTHON)
        assert in_pool(b) & before == set()
        await b.service._pool.round()
        await filled(b, 1)


@pytest.mark.parametrize("point", ["before_launch", "after_launch"])
async def test_a_stop_in_the_middle_of_filling_leaves_nothing(tmp_path: Path, point: str) -> None:
    async with bench(tmp_path, pool_min=3) as b:
        await filled(b, 3)
        gate = Gate()
        setattr(b.provider, point, gate)
        await b.service.create(CreateRequest())
        await until(lambda: len(gate.came) == 1)
        assert len(b.world.agents) >= 3
    assert len(b.world.agents) == 1  # the sandbox: `drain` keeps it


async def test_a_creator_who_leaves_with_a_ready_box_leaves_no_box(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=1) as b:
        await filled(b, 1)
        (ready,) = in_pool(b)
        b.world.agents[ready].mute = True  # the question whether it lives takes its time
        asked = asyncio.create_task(b.service.create(CreateRequest()))
        await until(lambda: b.world.connections[ready])
        asked.cancel()
        await until(lambda: ready not in b.world.agents and b.service.list() == [])


def _shelf(b: Bench) -> Shelf:
    (found,) = b.service._pool._shelves.values()
    return found
