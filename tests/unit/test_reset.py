"""Reset: another box under the same id, and nobody reaches the old one any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from capsule.errors import GoneError, NotFoundError, UnavailableError
from capsule.model import Isolation, SandboxId, Started, State
from capsule.service import CreateRequest, ExecCall, Sandbox, former
from capsule.service.entry import Entry
from tests.support import eventually
from tests.unit.service_double import Bench, HaltableBox, World, bench

TRUE = ExecCall(("true",))
WAIT = ExecCall(("wait",))


def box_of(b: Bench, id: str) -> SandboxId:
    return b.service._sandboxes.find(id).box_id


class Gate:
    """Holds a call of the provider's until `go`."""

    def __init__(self, only: SandboxId | None = None) -> None:
        self.came, self.go = asyncio.Event(), asyncio.Event()
        self._only = only

    async def hold(self, id: SandboxId) -> None:
        if self._only in (None, id):
            self.came.set()
            await self.go.wait()


@asynccontextmanager
async def halting(folder: Path) -> AsyncIterator[tuple[Bench, Sandbox, Gate]]:
    """A sandbox whose first box ends before it is removed, which the gate holds up."""
    async with bench(folder) as b:
        b.provider.box = HaltableBox
        made = await b.service.create(CreateRequest())
        gate = Gate(only=made.id)
        b.provider.before_destroy = gate.hold
        yield b, made, gate


async def agree(id: SandboxId) -> None:
    pass


async def fail(id: SandboxId) -> None:
    raise OSError("a provider's mistake")


def only(old: SandboxId) -> Callable[[SandboxId], Awaitable[None]]:
    """Refuses to let go of this one."""
    return lambda id: refuse(id) if id == old else agree(id)


async def refuse(id: SandboxId) -> None:
    raise UnavailableError("no room")


async def test_it_keeps_its_id_and_gets_another_box(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(metadata={"a": "1"}, ttl=100.0))
        before = box_of(b, made.id)
        b.clock.pass_time(40.0)
        again = await b.service.reset(made.id)
        assert again.id == made.id
        assert (again.metadata, again.expires_at) == (made.metadata, made.expires_at)
        assert again.started is Started.COLD
        assert box_of(b, made.id) != before
        assert list(b.world.agents) == [box_of(b, made.id)]
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        await b.service.delete(made.id)
        assert b.world.agents == {}


async def test_the_pool_makes_it_warm(tmp_path: Path) -> None:
    async with bench(tmp_path, pool_min=1) as b:
        made = await b.service.create(CreateRequest())
        await eventually(lambda: b.service.pool().shelves[0].ready == 1, what="a box is ready")
        assert (await b.service.reset(made.id)).started is Started.WARM


async def test_a_restarted_server_finds_the_new_box(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        await b.service.reset(made.id)
        new = box_of(b, made.id)
    async with bench(tmp_path, world=b.world) as b:
        assert box_of(b, made.id) == new
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        assert list(b.world.agents) == [new]


async def test_what_runs_ends_with_a_reason(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        live = await b.service.start(made.id, WAIT)
        waiting = asyncio.create_task(b.service.exec(made.id, WAIT))
        await eventually(lambda: len(b.world.agents[made.id].execs) == 2, what="both execs run")
        await b.service.reset(made.id)
        with pytest.raises(GoneError, match="was reset during the call"):
            await waiting
        with pytest.raises(GoneError, match="was reset during the call"):
            await live.__anext__()
        await live.aclose()
        assert b.service.get(made.id).state is State.RUNNING
        assert await b.service.execs(made.id) == []


async def test_sessions_are_forgotten(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        await b.service.exec(made.id, ExecCall(("true",), session="s"))
        await b.service._store.save_session(
            made.id, "s", (await b.service._execs._sessions.get(_entry(b, made.id), "s"))
        )
        await b.service.reset(made.id)
        assert await b.service._store.sessions(made.id) == {}
        assert _entry(b, made.id).sessions == {}


def _entry(b: Bench, id: str) -> Entry:
    return b.service._sandboxes.find(id)


async def test_without_a_new_box_the_old_one_stays(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        b.provider.before_launch = refuse
        with pytest.raises(UnavailableError, match=f"{made.id} was not reset: no room"):
            await b.service.reset(made.id)
        assert box_of(b, made.id) == made.id
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0


async def test_an_old_box_that_does_not_go_is_told_and_removed_later(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        nothing = b.provider.before_destroy
        b.provider.before_destroy = refuse
        with pytest.raises(UnavailableError, match="was reset, but its old box"):
            await b.service.reset(made.id)
        b.provider.before_destroy = nothing
        assert len(b.world.agents) == 2
        await b.service.reaper.tidy()
        assert list(b.world.agents) == [box_of(b, made.id)]
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0


async def test_nobody_waits_for_the_removal_of_what_is_halted(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        assert (await b.service.reset(made.id)).state is State.RUNNING
        await gate.came.wait()
        assert not b.world.agents[made.id].alive
        await b.service.reaper.tidy()
        assert len(b.world.agents) == 2  # no orphan: somebody is at it
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        gate.go.set()
        await eventually(lambda: len(b.world.agents) == 1, what="the old box is removed")
        assert _entry(b, made.id).formers == set()


async def test_the_reaper_leaves_a_box_alone_that_is_being_halted(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        halt = Gate()
        b.provider.before_halt = halt.hold
        resetting = asyncio.create_task(b.service.reset(made.id))
        await halt.came.wait()
        await b.service.reaper.tidy()
        assert len(b.world.agents) == 2
        halt.go.set()
        await resetting
        gate.go.set()


async def test_what_does_not_halt_is_waited_for(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        b.provider.before_halt = refuse
        resetting = asyncio.create_task(b.service.reset(made.id))
        await gate.came.wait()
        await asyncio.sleep(0.01)
        assert not resetting.done()
        gate.go.set()
        await resetting
        assert list(b.world.agents) == [box_of(b, made.id)]


async def test_what_halts_too_slowly_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(former, "HALT_BUDGET", 0.01)
    async with halting(tmp_path) as (b, made, gate):
        b.provider.before_halt = Gate().hold
        resetting = asyncio.create_task(b.service.reset(made.id))
        await gate.came.wait()
        await asyncio.sleep(0.01)
        assert not resetting.done()
        gate.go.set()
        await resetting
        assert list(b.world.agents) == [box_of(b, made.id)]


async def test_a_provider_that_fails_to_halt_is_asked_to_remove(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        b.provider.before_halt = fail
        gate.go.set()
        with capture_logs() as logs:
            await b.service.reset(made.id)
        assert [line["event"] for line in logs if line["log_level"] == "error"] == [
            "box not halted"
        ]
        assert list(b.world.agents) == [box_of(b, made.id)]
        assert b.service._pool.held == set()


async def test_boxes_do_not_come_quicker_than_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(former, "MOST", 2)
    async with halting(tmp_path) as (b, made, _):
        gate = Gate()
        for _ in range(3):  # one after the other they are not many
            b.provider.before_destroy = agree
            await b.service.reset(made.id)
            await eventually(lambda: len(b.world.agents) == 1, what="the old box is removed")
        b.provider.before_destroy = gate.hold
        launched = b.world.launched
        for _ in range(2):
            await b.service.reset(made.id)
        third = asyncio.create_task(b.service.reset(made.id))
        await eventually(lambda: b.world.launched == launched + 3, what="it has its next box")
        await asyncio.sleep(0.01)
        assert not third.done()
        gate.go.set()
        await third
        await eventually(lambda: len(b.world.agents) == 1, what="the old boxes are removed")


async def test_a_delete_waits_for_all_that_was_its_own(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        await b.service.reset(made.id)
        deleting = asyncio.create_task(b.service.delete(made.id))
        await eventually(lambda: list(b.world.agents) == [made.id], what="its own box is gone")
        await asyncio.sleep(0.01)
        assert not deleting.done()
        gate.go.set()
        await deleting
        assert b.world.agents == {}


async def test_a_delete_tries_again_what_could_not_be_removed(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, _):
        b.provider.before_destroy = refuse
        await b.service.reset(made.id)
        await eventually(lambda: b.service._pool.held == set(), what="it was given up")
        b.provider.before_destroy = only(made.id)
        with pytest.raises(UnavailableError, match="no room"):
            await b.service.delete(made.id)
        assert b.service.get(made.id).state is State.STOPPING
        b.provider.before_destroy = agree
        await b.service.delete(made.id)
        assert b.world.agents == {}


async def test_a_server_that_stops_removes_what_was_halted(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        await b.service.reset(made.id)
        new = box_of(b, made.id)
        asyncio.get_running_loop().call_later(0.01, gate.go.set)
    assert list(b.world.agents) == [new]


async def test_what_was_halted_and_cannot_be_removed_is_tried_again(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, _):
        b.provider.before_destroy = refuse
        await b.service.reset(made.id)
        await eventually(lambda: b.service._pool.held == set(), what="it was given up")
        assert len(b.world.agents) == 2
        assert len(_entry(b, made.id).formers) == 1, "it has its layers"
        b.provider.before_destroy = agree
        await b.service.reaper.tidy()
        assert list(b.world.agents) == [box_of(b, made.id)]
        assert _entry(b, made.id).formers == set()


async def test_a_delete_in_the_middle_of_it_leaves_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        gate = Gate()
        b.provider.before_launch = gate.hold
        resetting = asyncio.create_task(b.service.reset(made.id))
        await gate.came.wait()
        await b.service.delete(made.id)
        assert b.world.agents == {}
        with pytest.raises(GoneError, match="it was deleted"):
            await resetting


async def test_a_delete_waits_for_the_old_box(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        gate = Gate(only=made.id)
        b.provider.before_destroy = gate.hold
        resetting = asyncio.create_task(b.service.reset(made.id))
        await gate.came.wait()
        deleting = asyncio.create_task(b.service.delete(made.id))
        await asyncio.sleep(0)
        assert not deleting.done()
        gate.go.set()
        await deleting
        assert b.world.agents == {}
        with pytest.raises(GoneError):
            await resetting


async def test_a_delete_ends_resets_that_wait(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        gate = Gate()
        b.provider.before_launch = gate.hold
        resets = [asyncio.create_task(b.service.reset(made.id)) for _ in range(3)]
        await gate.came.wait()
        await b.service.delete(made.id)
        gate.go.set()
        for resetting in resets:
            with pytest.raises(GoneError, match="it was deleted"):
                await resetting
        assert b.world.agents == {} and b.world.launched == 1


async def test_a_reset_that_was_not_begun_is_over_too(tmp_path: Path) -> None:
    """A delete in the same turn of the loop cancels it before its first step."""
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        entry = _entry(b, made.id)
        deleting = asyncio.create_task(b.service.delete(made.id))
        resetting = asyncio.create_task(b.service.reset(made.id))
        late = asyncio.create_task(b.service.reset(made.id))
        await deleting
        async with asyncio.timeout(5):
            for each in (resetting, late):
                with pytest.raises(GoneError, match="it was deleted"):
                    await each
        assert entry.resetting is None and b.world.agents == {}


async def test_two_at_once_are_two(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        await asyncio.gather(b.service.reset(made.id), b.service.reset(made.id))
        assert b.world.launched == 3
        assert list(b.world.agents) == [box_of(b, made.id)]


async def test_a_caller_who_leaves_does_not_stop_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        gate = Gate()
        b.provider.before_launch = gate.hold
        resetting = asyncio.create_task(b.service.reset(made.id))
        await gate.came.wait()
        resetting.cancel()
        gate.go.set()
        await eventually(lambda: box_of(b, made.id) != made.id, what="it is reset")
        await eventually(lambda: len(b.world.agents) == 1, what="the old box is gone")


async def test_the_reaper_leaves_both_boxes_alone_meanwhile(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        gate = Gate()
        b.provider.after_launch = gate.hold
        resetting = asyncio.create_task(b.service.reset(made.id))
        await gate.came.wait()
        assert len(b.world.agents) == 2
        await b.service.reaper.tidy()
        assert len(b.world.agents) == 2
        gate.go.set()
        await resetting


async def test_the_end_of_the_old_box_is_not_the_end_of_the_sandbox(tmp_path: Path) -> None:
    """The pulse asks about the old box, and hears of its end when there is a new one."""
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        gate = Gate()
        b.provider.before_adopt = gate.hold
        b.world.agents[made.id].alive = False
        b.clock.pass_time(10.0)
        asking = asyncio.create_task(b.service._pulse.round())
        await gate.came.wait()
        await b.service.reset(made.id)
        gate.go.set()
        await asking
        assert b.service.get(made.id).state is State.RUNNING


async def test_what_is_not_there_cannot_be_reset(tmp_path: Path) -> None:
    async with bench(tmp_path, world=World()) as b:
        with pytest.raises(NotFoundError):
            await b.service.reset("nobody")
        made = await b.service.create(CreateRequest())
        await b.service.delete(made.id)
        with pytest.raises(GoneError):
            await b.service.reset(made.id)


async def test_it_does_not_get_weaker_walls(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        _entry(b, made.id).isolation = Isolation.GVISOR
        with pytest.raises(UnavailableError, match="was not reset"):
            await b.service.reset(made.id)
        assert list(b.world.agents) == [made.id]


async def test_what_it_was_asked_for_is_known_after_a_restart(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(runtime="special"))
    async with bench(tmp_path, world=b.world) as b:
        assert _entry(b, made.id).runtime == "special"
