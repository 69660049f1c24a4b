"""The pool: what it hands out, how large it is, who waits, and that nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from capsule.errors import CapacityError, UnavailableError
from capsule.model import MIB, Limits, SandboxId, SandboxSpec, Started, State
from capsule.providers.contract import Box
from capsule.service import CreateRequest, ExecCall
from capsule.service import pool as pools
from capsule.service.shelf import WINDOW, Shelf, ShelfStatus
from tests.support import eventually
from tests.unit.service_double import PYTHON, Bench, FakeBox, FakeProvider, World, bench

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


class Gate:
    """Keeps launches waiting until it is opened."""

    def __init__(self) -> None:
        self.came: list[SandboxId] = []
        self.most = 0
        self._inside = 0
        self._open = asyncio.Event()

    async def __call__(self, id: SandboxId) -> None:
        self.came.append(id)
        self._inside += 1
        self.most = max(self.most, self._inside)
        try:
            await self._open.wait()
        finally:
            self._inside -= 1

    def open(self) -> None:
        self._open.set()


async def test_without_a_setting_there_is_no_pool(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        await b.service._pool.round()
        assert made.started is Started.COLD
        assert b.service.pool().shelves == ()
        assert set(b.world.agents) == {made.id}


async def test_a_create_takes_what_is_ready_and_it_is_replaced(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=2) as b:
        await filled(b, 2)
        ready = in_pool(b)
        made = await b.service.create(CreateRequest(env={"A": "b"}, ttl=77.0, metadata={"m": "1"}))
        assert made.started is Started.WARM
        assert b.service.get(made.id).started is Started.WARM
        assert made.id not in b.world.agents  # its box came before it, and has a name of its own
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        await filled(b, 2)
        assert len(in_pool(b) & ready) == 1
        assert (shelf(b).hits, shelf(b).misses) == (1, 0)
        await b.service.delete(made.id)
        assert len(b.world.agents) == 2
    assert b.world.agents == {}


async def test_what_is_used_comes_to_be_ready(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_max=3) as b:
        first = await b.service.create(CreateRequest())
        assert first.started is Started.COLD
        await filled(b, 1)
        assert (await b.service.create(CreateRequest())).started is Started.WARM
        assert (shelf(b).hits, shelf(b).misses, shelf(b).target) == (1, 1, 1)


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


async def test_what_is_needed_in_every_window_stays(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_max=4) as b:
        await b.service.create(CreateRequest())
        for _ in range(5):
            await filled(b, 1)
            assert (await b.service.create(CreateRequest())).started is Started.WARM
            b.clock.pass_time(WINDOW + 1)
            await b.service._pool.round()
        assert shelf(b).target == 1


async def test_all_shelves_stay_within_the_memory(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=8, pool_memory=3 * FakeBox.idle_memory + MIB) as b:
        await filled(b, 3)
        await b.service._pool.round()
        status = b.service.pool()
        assert (shelf(b).ready, shelf(b).launching) == (3, 0)
        assert status.memory_bytes <= status.max_memory_bytes


async def test_a_small_budget_holds_what_fits_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBox, "idle_memory", MIB)  # as the local provider's
    async with bench(tmp_path, pool_min=8, pool_memory=3 * MIB) as b:
        await filled(b, 3)
        assert b.service.pool().memory_bytes == 3 * MIB


async def test_a_budget_without_room_for_one_box_says_so(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with bench(tmp_path, pool_min=2, pool_memory=FakeBox.idle_memory - 1) as b:
            await until(lambda: shelf(b).launching == 0 and b.world.launched)
            await until(lambda: not in_pool(b))
            assert (shelf(b).ready, b.service.pool().memory_bytes) == (0, 0)
            assert (await b.service.create(CreateRequest())).started is Started.COLD
    (said,) = [line for line in logs if line["event"].startswith("pool_memory has no room")]
    assert (said["one"], said["limit"]) == (FakeBox.idle_memory, FakeBox.idle_memory - 1)


async def test_a_shelf_of_silent_boxes_keeps_nobody_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PATIENCE", 0.05)
    async with bench(tmp_path, pool_min=pools.TRIES + 2) as b:
        await filled(b, pools.TRIES + 2)
        for id in in_pool(b):
            b.world.agents[id].mute = True
        with capture_logs() as logs:
            made = await b.service.create(CreateRequest())
        assert (made.started, shelf(b).discarded) == (Started.COLD, pools.TRIES)
        reasons = {each["reason"] for each in logs if each["event"] == "ready box not used"}
        assert reasons == {"it did not answer within 0.05 s"}


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


async def test_a_box_that_dies_on_the_shelf_is_noticed(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=1) as b:
        await filled(b, 1)
        (dead,) = in_pool(b)
        b.world.kill(dead)
        b.clock.pass_time(pools.CHECK_EVERY + 1)
        await b.service._pool.round()
        await until(lambda: dead not in b.world.agents and shelf(b).ready == 1)
        assert shelf(b).discarded == 1


async def test_other_limits_than_a_box_can_be_given_start_cold(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=1) as b:
        await filled(b, 1)
        for limits in ({"memory": 64 * MIB}, {"disk": 64 * MIB}):
            made = await b.service.create(CreateRequest(limits=limits))
            assert made.started is Started.COLD
        assert (shelf(b).ready, shelf(b).hits, shelf(b).misses) == (1, 0, 2)


class PliantBox(FakeBox):
    adjusted: Limits | None = None
    refuses = False

    def adjusts(self, limits: Limits) -> bool:
        return limits.disk == Limits().disk

    async def adjust(self, limits: Limits) -> None:
        if self.refuses:
            raise UnavailableError("no")
        self.adjusted = limits


class PliantProvider(FakeProvider):
    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        await super().launch(sandbox_id, spec)
        return PliantBox(self, sandbox_id)


async def test_limits_are_adjusted_where_a_box_can(tmp_path: Path) -> None:
    world = World()
    async with bench(tmp_path, world=world, provider=PliantProvider(world), pool_min=1) as b:
        await filled(b, 1)
        made = await b.service.create(CreateRequest(limits={"memory": 64 * MIB}))
        assert made.started is Started.WARM
        assert made.limits.memory == 64 * MIB
        box = b.service._sandboxes.find(made.id).box
        assert isinstance(box, PliantBox)
        assert box.adjusted == made.limits
        await filled(b, 1)
        other = await b.service.create(CreateRequest(limits={"disk": 64 * MIB}))
        assert other.started is Started.COLD


async def test_a_box_that_cannot_be_adjusted_after_all_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PliantBox, "refuses", True)
    world = World()
    async with bench(tmp_path, world=world, provider=PliantProvider(world), pool_min=1) as b:
        await filled(b, 1)
        (refused,) = in_pool(b)
        made = await b.service.create(CreateRequest(limits={"memory": 64 * MIB}))
        assert made.started is Started.COLD
        await until(lambda: refused not in b.world.agents)


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
        assert gate.most == 2
        assert (b.service.pool().waiting, b.service.pool().launching) == (0, 0)


async def test_a_turn_that_does_not_come_is_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "LAUNCH_BUDGET", 0.05)
    async with bench(tmp_path, max_launches=1) as b:
        line = b.service._pool._line("fake")
        place = line.try_take()
        assert place is not None
        with pytest.raises(CapacityError, match="no box within") as caught:
            await b.service.create(CreateRequest())
        assert caught.value.retry_after == pools.RETRY_AFTER
        place.leave()
        assert (await b.service.create(CreateRequest())).state is State.RUNNING


async def test_who_waits_is_served_by_what_becomes_ready(tmp_path: Path) -> None:
    gates: dict[SandboxId, Gate] = {}

    async def keep(id: SandboxId) -> None:
        gates[id] = Gate()
        await gates[id](id)

    async with bench(tmp_path, max_launches=1, pool_min=1) as b:
        await filled(b, 1)
        b.provider.before_launch = keep
        await b.service.create(CreateRequest())
        await until(lambda: len(gates) == 1)  # what replaces it has the only place
        waiting = asyncio.create_task(b.service.create(CreateRequest()))
        await until(lambda: b.service.pool().waiting == 1)
        assert shelf(b).waiting == 1
        gates.popitem()[1].open()
        assert (await waiting).started is Started.WARM
        for gate in gates.values():
            gate.open()


async def test_shelves_are_not_filled_while_somebody_waits(tmp_path: Path) -> None:
    gate = Gate()
    async with bench(tmp_path, max_launches=2, pool_max=4) as b:
        b.provider.before_launch = gate
        asked = [asyncio.create_task(b.service.create(CreateRequest())) for _ in range(4)]
        await until(lambda: b.service.pool().waiting == 2)
        order = list(b.service._sandboxes.entries)
        gate.open()
        await asyncio.gather(*asked)
        assert gate.came[:4] == order


async def test_a_launch_that_waits_itself_gives_up_its_place(tmp_path: Path) -> None:
    world = World()
    pulled = asyncio.Event()

    class Pulls(FakeProvider):
        async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
            if not pulled.is_set() and world.launched == 0:
                assert spec.progress is not None
                spec.progress("pulling")
                world.launched += 1
                await pulled.wait()
            return await super().launch(sandbox_id, spec)

    async with bench(tmp_path, world=world, provider=Pulls(world), max_launches=1) as b:
        slow = asyncio.create_task(b.service.create(CreateRequest()))
        await until(lambda: [s.progress for s in b.service.list()] == ["pulling"])
        assert (await b.service.create(CreateRequest())).state is State.RUNNING
        pulled.set()
        assert (await slow).progress == ""


async def test_a_shelf_that_cannot_be_filled_is_tried_again_later(tmp_path: Path) -> None:
    async def refuse(id: SandboxId) -> None:
        raise UnavailableError("not now")

    world = World()
    provider = FakeProvider(world)
    provider.before_launch = refuse
    async with bench(tmp_path, world=world, provider=provider, pool_min=1) as b:
        await until(lambda: _shelf(b).failures == 1)
        await b.service._pool.round()
        assert _shelf(b).failures == 1
        b.clock.pass_time(2.0)
        await b.service._pool.round()
        await until(lambda: _shelf(b).failures == 2)
        provider.before_launch = _pass
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


async def _pass(id: SandboxId) -> None:
    pass


Point = Callable[[Bench, Gate], None]


def _at_launch(b: Bench, gate: Gate) -> None:
    b.provider.before_launch = gate


def _after_launch(b: Bench, gate: Gate) -> None:
    b.provider.after_launch = gate


@pytest.mark.parametrize("point", [_at_launch, _after_launch])
async def test_a_stop_in_the_middle_of_filling_leaves_nothing(tmp_path: Path, point: Point) -> None:
    async with bench(tmp_path, pool_min=3) as b:
        await filled(b, 3)
        gate = Gate()
        point(b, gate)
        await b.service.create(CreateRequest())
        await until(lambda: len(gate.came) == 1)
        assert len(b.world.agents) >= 3
    assert len(b.world.agents) == 1  # the sandbox: `drain` keeps it


async def test_a_creator_who_leaves_the_line_is_not_served(tmp_path: Path) -> None:
    gate = Gate()
    async with bench(tmp_path, max_launches=1) as b:
        b.provider.before_launch = gate
        asked = [asyncio.create_task(b.service.create(CreateRequest())) for _ in range(3)]
        await until(lambda: b.service.pool().waiting == 2)
        asked[1].cancel()
        await until(lambda: b.service.pool().waiting == 1)
        gate.open()
        await asyncio.gather(asked[0], asked[2])
        assert len(b.world.agents) == 2
        assert b.service.pool().launching == 0


async def test_a_creator_who_leaves_with_a_ready_box_leaves_no_box(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=1) as b:
        await filled(b, 1)
        (ready,) = in_pool(b)
        b.world.agents[ready].mute = True  # the question whether it lives takes its time
        asked = asyncio.create_task(b.service.create(CreateRequest()))
        await until(lambda: b.world.connections[ready])
        asked.cancel()
        await until(lambda: ready not in b.world.agents and b.service.list() == [])


async def test_a_turn_given_to_somebody_who_just_left_goes_on(tmp_path: Path) -> None:
    async with bench(tmp_path, max_launches=1) as b:
        line = b.service._pool._line("fake")
        place = line.try_take()
        assert place is not None
        first = asyncio.create_task(b.service.create(CreateRequest(idempotency_key="k")))
        await until(lambda: b.service.pool().waiting == 1)
        (entry,) = b.service._sandboxes.entries.values()
        launching = entry.launching
        assert launching is not None
        place.leave()  # given, and before it wakes up,
        launching.cancel()
        with pytest.raises(Exception, match="over"):
            await first
        assert b.service.pool().launching == 0
        assert (await b.service.create(CreateRequest())).state is State.RUNNING


async def test_what_a_killed_server_had_ready_is_removed(tmp_path: Path) -> None:
    world = World()
    async with bench(tmp_path, world=world, pool_min=2) as b:
        await filled(b, 2)
        kept = await b.service.create(CreateRequest())
        await filled(b, 2)
        left = dict(world.agents)
    for id, agent in left.items():  # as if nothing had been cleared away
        world.add(id).alive = agent.alive or True
    assert len(world.agents) == 3
    async with bench(tmp_path, world=world, pool_min=0) as b:
        assert [s.id for s in b.service.list()] == [kept.id]
        assert b.service.get(kept.id).started is Started.WARM
        assert (await b.service.exec(kept.id, TRUE)).exit.exit_code == 0
        assert len(world.agents) == 1


def _shelf(b: Bench) -> Shelf:
    (found,) = b.service._pool._shelves.values()
    return found
