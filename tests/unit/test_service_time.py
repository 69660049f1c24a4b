"""TTL, idle timeout, renewal, and clocks that somebody sets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from capsule.errors import GoneError, InvalidError, NoSpaceError, UnavailableError
from capsule.model import SandboxId
from capsule.service import CreateRequest, ExecCall
from capsule.service.entry import Record
from capsule.service.store import Claim, SqliteStore
from tests.support import eventually
from tests.unit.service_double import Bench, FakeExec, TurnedClock, World, bench

DAY = 86400.0


async def sweep(b: Bench) -> None:
    """One round of the reaper, and all that it began."""
    await b.service.reaper.expire()
    await eventually(lambda: not b.service.reaper._ending, what="the round's ends")


async def test_a_sandbox_ends_with_its_ttl_and_not_before(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        b.clock.pass_time(99)
        await sweep(b)
        assert b.service.get(made.id)
        b.clock.pass_time(1.5)
        await sweep(b)
        assert b.world.agents == {}
        with pytest.raises(GoneError, match="its time was over"):
            b.service.get(made.id)


@pytest.mark.parametrize("jump", [DAY, -DAY])
async def test_setting_the_clock_neither_ends_nor_keeps_a_sandbox(
    tmp_path: Path, jump: float
) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        b.clock.set_wall(jump)
        await sweep(b)
        shown = b.service.get(made.id)
        assert shown.expires_at.timestamp() == pytest.approx(b.clock.now() + 100)
        b.clock.pass_time(101)
        await sweep(b)
        assert b.world.agents == {}


@pytest.mark.parametrize("jump", [DAY, -DAY])
async def test_the_clock_may_be_set_across_a_restart(tmp_path: Path, jump: float) -> None:
    clock = TurnedClock()
    async with bench(tmp_path, clock=clock) as b:
        made = await b.service.create(CreateRequest(ttl=100))
    clock.set_wall(jump)
    clock.pass_time(50)
    async with bench(tmp_path, clock=clock, world=b.world) as b:
        await sweep(b)
        assert b.service.get(made.id)
        clock.pass_time(51)
        await sweep(b)
        assert b.world.agents == {}


async def test_after_a_reboot_the_wall_clock_decides(tmp_path: Path) -> None:
    clock, world = TurnedClock(), World()
    async with bench(tmp_path, clock=clock, world=world) as b:
        short = await b.service.create(CreateRequest(ttl=100))
        long = await b.service.create(CreateRequest(ttl=1000))
    clock.pass_time(500)
    clock.reboot()
    async with bench(tmp_path, clock=clock, world=world) as b:
        await sweep(b)
        with pytest.raises(GoneError):
            b.service.get(short.id)
        b.clock.pass_time(499)
        await sweep(b)
        assert b.service.get(long.id)
        b.clock.pass_time(2)
        await sweep(b)
        assert world.agents == {}


async def test_set_timeout_counts_from_now(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        b.clock.pass_time(90)
        longer = await b.service.set_timeout(made.id, 100)
        assert longer.expires_at.timestamp() == pytest.approx(b.clock.now() + 100)
        b.clock.pass_time(95)
        await sweep(b)
        assert b.service.get(made.id)
        await b.service.set_timeout(made.id, 0)
        await sweep(b)
        assert b.world.agents == {}


@pytest.mark.parametrize("ttl", [-1, 1e9, float("nan"), float("inf"), "10", True, None])
async def test_bad_timeouts_are_refused(tmp_path: Path, ttl: float) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        with pytest.raises(InvalidError, match="ttl"):
            await b.service.set_timeout(made.id, ttl)


async def test_keep_alive_extends_by_its_own_ttl_and_never_shortens(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        b.clock.pass_time(60)
        kept = await b.service.keep_alive(made.id)
        assert kept.expires_at.timestamp() == pytest.approx(b.clock.now() + 100)


async def test_extend_never_shortens(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        assert (await b.service.extend(made.id, 5)).expires_at == made.expires_at
        longer = await b.service.extend(made.id, 500)
        assert longer.expires_at.timestamp() == pytest.approx(b.clock.now() + 500)


async def test_notes_survive_a_restart(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(notes={"a": "1", "b": "1"}))
        await b.service.annotate(made.id, {"b": "2"})
    async with bench(tmp_path, world=b.world) as b:
        assert b.service.get(made.id).notes == {"a": "1", "b": "2"}


async def test_a_renewal_survives_a_restart(tmp_path: Path) -> None:
    clock = TurnedClock()
    async with bench(tmp_path, clock=clock) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        await b.service.set_timeout(made.id, 1000)
    clock.pass_time(500)
    async with bench(tmp_path, clock=clock, world=b.world) as b:
        await sweep(b)
        assert b.service.get(made.id)


async def test_a_renewal_that_comes_with_the_timer_wins(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        b.clock.pass_time(101)
        await b.service.reaper.expire()  # has seen it; its task has not run
        await b.service.keep_alive(made.id)
        await eventually(lambda: not b.service.reaper._ending, what="the round's ends")
        await b.service.exec(made.id, ExecCall(("true",)))


async def test_a_renewal_after_the_end_began_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        held = asyncio.Event()

        async def hold(_: SandboxId) -> None:
            await held.wait()

        b.provider.before_destroy = hold
        b.clock.pass_time(101)
        await b.service.reaper.expire()
        await eventually(lambda: b.service.get(made.id).state == "stopping", what="stopping")
        with pytest.raises(GoneError, match="its time was over"):
            await b.service.keep_alive(made.id)
        held.set()


async def test_idle_timeout_ends_what_nobody_uses(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(idle_timeout=10))
        other = await b.service.create(CreateRequest())
        b.clock.pass_time(9)
        await b.service.exec(made.id, ExecCall(("true",)))
        b.clock.pass_time(9)
        await sweep(b)
        assert b.service.get(made.id)
        b.clock.pass_time(2)
        await sweep(b)
        with pytest.raises(GoneError, match="nobody used it for 10 seconds"):
            b.service.get(made.id)
        assert b.service.get(other.id)


async def test_to_look_at_execs_is_no_activity_and_moves_no_moment(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(idle_timeout=10))
        await b.service.exec(made.id, ExecCall(("true",)))
        began = b.clock.now()
        first = await b.service.look_at_execs(made.id)
        assert [each.at for each in first] == [pytest.approx(began, abs=0.1)]
        b.clock.pass_time(9)  # the agent's answer stays as it was, as if it came nine seconds late
        assert await b.service.look_at_execs(made.id) == first
        b.clock.pass_time(2)
        await sweep(b)
        with pytest.raises(GoneError, match="nobody used it for 10 seconds"):
            await b.service.look_at_execs(made.id)


async def test_moments_of_execs_are_kept_of_those_that_the_agent_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsule.service.execs.MAX_BEGAN", 2)
    async with bench(tmp_path) as b:
        id = (await b.service.create(CreateRequest())).id
        for _ in range(5):
            await b.service.exec(id, ExecCall(("true",)))
            (seen,) = await b.service.look_at_execs(id)
            b.world.agents[id].execs.clear()
        assert seen.info.id in (began := b.service._sandboxes.find(id).began)
        assert len(began) <= 2


async def test_an_operation_going_on_is_activity_to_its_end(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(idle_timeout=10))
        call = asyncio.create_task(b.service.exec(made.id, ExecCall(("wait",))))
        (run,) = await eventually(lambda: b.world.agents[made.id].execs.values(), what="runs")
        b.clock.pass_time(60)
        await sweep(b)
        run.end()
        await call
        b.clock.pass_time(9)
        await sweep(b)
        assert b.service.get(made.id)


async def test_a_program_left_running_is_activity_but_a_shell_is_not(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(idle_timeout=10))
        left = await b.service.start(made.id, ExecCall(("wait",)))
        await left.aclose()
        agent = b.world.agents[made.id]
        agent.execs["t-main-1"] = FakeExec("t-main-1", ["bash"], {"tty": True})
        b.clock.pass_time(60)
        await sweep(b)
        assert b.service.get(made.id)
        agent.execs[left.exec_id].end()
        b.clock.pass_time(11)
        await sweep(b)
        assert b.world.agents == {}


async def test_use_while_the_reaper_asks_saves_an_idle_sandbox(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(idle_timeout=10))
        b.clock.pass_time(11)
        await b.service.reaper.expire()
        await b.service.exec(made.id, ExecCall(("true",)))
        await eventually(lambda: not b.service.reaper._ending, what="the round's ends")
        assert b.service.get(made.id)


async def test_an_end_that_fails_is_tried_again_and_holds_up_no_other(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        stuck = await b.service.create(CreateRequest(ttl=10))
        easy = await b.service.create(CreateRequest(ttl=10))

        async def broken(id: SandboxId) -> None:
            if id == stuck.id:
                raise UnavailableError("not now")

        b.provider.before_destroy = broken
        b.clock.pass_time(11)
        await sweep(b)
        assert list(b.world.agents) == [stuck.id]
        with pytest.raises(GoneError):
            b.service.get(easy.id)

        async def fine(_: SandboxId) -> None:
            pass

        b.provider.before_destroy = fine
        await sweep(b)
        assert b.world.agents, "it waits a little before it tries again"
        b.clock.pass_time(6)
        await sweep(b)
        assert b.world.agents == {}


async def test_the_key_of_a_create_is_free_when_it_is_undone(tmp_path: Path) -> None:
    class Full(SqliteStore):
        full = False

        async def remove(self, id: SandboxId) -> None:
            if self.full:
                raise NoSpaceError("no space left")
            await super().remove(id)

    store = Full(tmp_path / "full.db")

    async def no_space(_: SandboxId) -> None:
        store.full = True
        raise NoSpaceError("no space left")

    request = CreateRequest(idempotency_key="k")
    async with bench(tmp_path, store=store) as b:
        launches, b.provider.after_launch = b.provider.after_launch, no_space
        with pytest.raises(NoSpaceError):
            await b.service.create(request)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="failed and is not undone yet"):
                await b.service.create(request)
            b.clock.pass_time(6)
            await sweep(b)
        store.full, b.provider.after_launch = False, launches
        b.clock.pass_time(6)
        await sweep(b)
        await eventually(lambda: not b.service._sandboxes.unremoved, what="it is undone")
        made = await b.service.create(request)
        assert await b.service.create(request) == made and len(b.world.agents) == 1


async def test_a_renewal_that_cannot_be_recorded_did_not_happen(tmp_path: Path) -> None:
    class Full(SqliteStore):
        full = False

        async def save(self, *records: Record, claim: Claim | None = None) -> None:
            if self.full:
                raise NoSpaceError("no space left")
            await super().save(*records, claim=claim)

    store = Full(tmp_path / "full.db")
    async with bench(tmp_path, store=store) as b:
        made = await b.service.create(CreateRequest(ttl=100))
        store.full = True
        with pytest.raises(NoSpaceError):
            await b.service.set_timeout(made.id, 1000)
        assert b.service.get(made.id) == made
        store.full = False
        b.clock.pass_time(101)
        await sweep(b)
        assert b.world.agents == {}
