"""Reset: another box under the same id, and the old one is out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from capsule.errors import GoneError, UnavailableError
from capsule.model import SandboxId, State
from capsule.service import CreateRequest, ExecCall, Sandbox
from tests.support import eventually
from tests.unit.service_double import Bench, Gate, HaltableBox, bench, turns

TRUE = ExecCall(("true",))
WAIT = ExecCall(("wait",))


def box_of(b: Bench, id: str) -> SandboxId:
    return b.service._sandboxes.find(id).box_id


@asynccontextmanager
async def halting(folder: Path) -> AsyncIterator[tuple[Bench, Sandbox, Gate]]:
    """A sandbox whose first box ends before it is removed, which the gate holds up."""
    async with bench(folder) as b:
        b.provider.box = HaltableBox
        made = await b.service.create(CreateRequest())
        gate = Gate(only=made.id)
        b.provider.before_destroy = gate
        yield b, made, gate


async def refuse(id: SandboxId) -> None:
    raise UnavailableError("no room")


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


async def test_without_a_new_box_the_old_one_stays(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        b.provider.before_launch = refuse
        with pytest.raises(UnavailableError, match=f"{made.id} was not reset: no room"):
            await b.service.reset(made.id)
        assert box_of(b, made.id) == made.id
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0


async def test_an_old_box_that_cannot_be_removed_is_removed_later(tmp_path: Path) -> None:
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


async def test_a_reset_does_not_wait_for_the_removal_of_a_halted_box(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        assert (await b.service.reset(made.id)).state is State.RUNNING
        await gate.reached()
        assert not b.world.agents[made.id].alive
        await b.service.reaper.tidy()
        assert len(b.world.agents) == 2  # no orphan: somebody is at it
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        gate.open()
        await eventually(lambda: len(b.world.agents) == 1, what="the old box is removed")


async def test_a_delete_waits_for_all_that_was_its_own(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        await b.service.reset(made.id)
        deleting = asyncio.create_task(b.service.delete(made.id))
        await eventually(lambda: list(b.world.agents) == [made.id], what="its own box is gone")
        await turns()
        assert not deleting.done()
        gate.open()
        await deleting
        assert b.world.agents == {}


async def test_a_server_that_stops_removes_what_was_halted(tmp_path: Path) -> None:
    async with halting(tmp_path) as (b, made, gate):
        await b.service.reset(made.id)
        new = box_of(b, made.id)
        gate.open()
    assert list(b.world.agents) == [new]


async def test_a_delete_in_the_middle_of_it_leaves_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        gate = Gate()
        b.provider.before_launch = gate
        resetting = asyncio.create_task(b.service.reset(made.id))
        await gate.reached()
        await b.service.delete(made.id)
        assert b.world.agents == {}
        with pytest.raises(GoneError, match="it was deleted"):
            await resetting


async def test_the_end_of_the_old_box_is_not_the_end_of_the_sandbox(tmp_path: Path) -> None:
    """The pulse asks about the old box, and hears of its end when there is a new one."""
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        gate = Gate()
        b.provider.before_adopt = gate
        b.world.agents[made.id].alive = False
        b.clock.pass_time(10.0)
        asking = asyncio.create_task(b.service._pulse.round())
        await gate.reached()
        await b.service.reset(made.id)
        gate.open()
        await asking
        assert b.service.get(made.id).state is State.RUNNING
