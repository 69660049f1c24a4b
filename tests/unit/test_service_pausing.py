"""What a pause does to a sandbox's timeouts and users, over boxes that live in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import ConflictError, GoneError, NotSupportedError
from capsule.model import SandboxId, State
from capsule.service import CreateRequest, ExecCall
from tests.support import eventually
from tests.unit.service_double import Bench, FakeProvider, PausableBox, TurnedClock, World, bench

TRUE = ExecCall(("true",))


@asynccontextmanager
async def pausing(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    world = options.pop("world", None) or World()
    provider = FakeProvider(world)
    provider.box, provider.features = PausableBox, frozenset({"pause"})
    async with bench(folder, world=world, provider=provider, **options) as desk:
        yield desk


async def refuse(id: SandboxId) -> None:
    raise ConflictError("not every process could be stopped")


async def test_at_its_timeout_it_is_paused_and_kept_for_paused_ttl(tmp_path: Path) -> None:
    async with pausing(tmp_path, paused_ttl=1000.0) as desk:
        made = await desk.service.create(CreateRequest(ttl=10.0, on_timeout="pause"))
        desk.clock.pass_time(11)
        await desk.service.reaper.expire()
        await eventually(
            lambda: desk.service.get(made.id).state is State.PAUSED, what="it to be paused"
        )
        assert desk.world.agents[made.id].paused
        left = desk.service.get(made.id).expires_at.timestamp() - desk.clock.now()
        assert 990 < left <= 1000
        desk.clock.pass_time(1001)
        await desk.service.reaper.expire()
        await eventually(lambda: desk.world.agents == {}, what="it to be deleted")
        with pytest.raises(GoneError, match=r"kept for paused_ttl: 1000 seconds"):
            desk.service.get(made.id)


async def test_by_default_a_pause_does_not_stop_the_ttl(tmp_path: Path) -> None:
    async with pausing(tmp_path) as desk:
        made = await desk.service.create(CreateRequest(ttl=10.0))
        await desk.service.pause(made.id)
        desk.clock.pass_time(11)
        await desk.service.reaper.expire()
        await eventually(lambda: desk.world.agents == {}, what="it to be deleted")


async def test_a_pause_that_holds_stops_the_ttl(tmp_path: Path) -> None:
    world, clock = World(), TurnedClock()
    options: dict[str, Any] = {"world": world, "clock": clock, "paused_ttl": 1000.0}
    async with pausing(tmp_path, drain="keep", **options) as desk:
        made = await desk.service.create(CreateRequest(ttl=10.0))
        paused = await desk.service.pause(made.id, hold=True)
        assert paused.pause_kept == "memory"
    clock.pass_time(500)
    async with pausing(tmp_path, **options) as desk:
        after = await desk.service.resume(made.id)
        assert after.state is State.RUNNING and after.pause_kept == ""
        assert after.expires_at.timestamp() - clock.now() == pytest.approx(10.0)


async def test_one_that_died_while_paused_is_failed_by_the_resume(tmp_path: Path) -> None:
    async with pausing(tmp_path) as desk:
        made = await desk.service.create(CreateRequest())
        await desk.service.pause(made.id)
        desk.world.kill(made.id)
        with pytest.raises(Exception, match="died while it was paused"):
            await desk.service.resume(made.id)
        assert desk.service.get(made.id).state is State.FAILED


async def test_a_pause_that_fails_leaves_it_running(tmp_path: Path) -> None:
    async with pausing(tmp_path) as desk:
        made = await desk.service.create(CreateRequest(ttl=10.0, on_timeout="pause"))
        desk.provider.before_pause = refuse
        with pytest.raises(ConflictError):
            await desk.service.pause(made.id)
        found = desk.service.get(made.id)
        assert found.state is State.RUNNING and found.expires_at == made.expires_at
        await desk.service.exec(made.id, TRUE)


async def test_a_restart_keeps_it_paused_and_its_end(tmp_path: Path) -> None:
    world, clock = World(), TurnedClock()
    options: dict[str, Any] = {"world": world, "clock": clock, "paused_ttl": 1000.0}
    async with pausing(tmp_path, drain="keep", **options) as desk:
        request = CreateRequest(ttl=10.0, on_timeout="pause", auto_resume=True)
        made = await desk.service.create(request)
        paused = await desk.service.pause(made.id)
    world.agents[made.id].paused = False
    async with pausing(tmp_path, **options) as desk:
        found = desk.service.get(made.id)
        assert found.state is State.PAUSED and found.expires_at == paused.expires_at
        assert world.agents[made.id].paused, "by this server, once more"
        await desk.service.exec(made.id, TRUE)
        assert desk.service.get(made.id).state is State.RUNNING


async def test_a_provider_that_cannot_says_so_before_anything_starts(tmp_path: Path) -> None:
    async with bench(tmp_path) as desk:
        with pytest.raises(NotSupportedError) as refused:
            await desk.service.create(CreateRequest(on_timeout="pause"))
        assert refused.value.details["field"] == "on_timeout" and desk.world.launched == 0
        made = await desk.service.create(CreateRequest())
        with pytest.raises(NotSupportedError):
            await desk.service.pause(made.id)
        await desk.service.exec(made.id, TRUE)
