"""TTL, idle timeout, renewal, and clocks that somebody sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.errors import GoneError, NoSpaceError, UnavailableError
from capsule.model import SandboxId
from capsule.service import CreateRequest, ExecCall
from capsule.service.store import SqliteStore
from tests.support import eventually
from tests.unit.service_double import Bench, FakeExec, Gate, TurnedClock, World, bench, nothing

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
    b.clock.set_wall(-2 * jump)  # while no server runs
    b.clock.pass_time(99)
    async with bench(tmp_path, clock=b.clock, world=b.world) as b:
        await sweep(b)
        assert b.service.get(made.id)
        b.clock.pass_time(2)
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
        b.provider.before_destroy = gate = Gate()
        b.clock.pass_time(101)
        await b.service.reaper.expire()
        await gate.reached()
        with pytest.raises(GoneError, match="its time was over"):
            await b.service.keep_alive(made.id)
        gate.open()


async def test_idle_timeout_ends_what_is_not_used(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(idle_timeout=10))
        other = await b.service.create(CreateRequest())
        for use in (
            lambda: b.service.exec(made.id, ExecCall(("true",))),
            lambda: b.service.keep_alive(made.id),
            lambda: b.service.execs(made.id),
        ):
            b.clock.pass_time(9)
            await use()
        b.clock.pass_time(9)
        await sweep(b)
        assert b.service.get(made.id)
        b.clock.pass_time(2)
        await sweep(b)
        with pytest.raises(GoneError, match="nobody used it for 10 seconds"):
            b.service.get(made.id)
        assert b.service.get(other.id)


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
        b.provider.before_destroy = nothing
        await sweep(b)
        assert b.world.agents, "it does not try again at once"
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
