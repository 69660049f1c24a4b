"""Everything at once, cancelled anywhere, over boxes that fail: afterwards nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from capsule.errors import CapsuleError, GoneError, UnavailableError
from capsule.model import SandboxId
from capsule.service import CreateRequest, ExecCall
from tests.support import eventually
from tests.unit.service_double import Bench, FakeExec, FakeProvider, World, bench

STEPS = 150
CALLERS = 8


class Chaos:
    """Callers that do anything to any sandbox; the same seed does the same."""

    def __init__(self, b: Bench, dice: random.Random) -> None:
        self.b = b
        self.dice = dice
        self.ids: list[SandboxId] = []

    async def turns(self) -> None:
        for _ in range(self.dice.randrange(6)):
            await asyncio.sleep(0)

    async def crooked(self, _: SandboxId) -> None:
        await self.turns()
        if self.dice.random() < 0.1:
            raise UnavailableError("the provider has a bad day")

    def any(self) -> SandboxId:
        return self.dice.choice(self.ids[-10:])

    async def create(self) -> None:
        key = self.dice.choice([None, "a", "b", "c"])
        ttl = self.dice.choice([None, 2.0])
        made = await self.b.service.create(CreateRequest(ttl=ttl, idempotency_key=key))
        self.ids.append(made.id)
        if (agent := self.b.world.agents.get(made.id)) is not None:
            agent.programs["/bin/bash"] = _until_killed

    async def exec(self) -> None:
        key, session = self.dice.choice([None, "a", "b"]), self.dice.choice([None, "s"])
        call = ExecCall(("echo", "x"), idempotency_key=key, session=session)
        await self.b.service.exec(self.any(), call)

    async def wait(self) -> None:
        await self.b.service.exec(self.any(), ExecCall(("wait",)))

    async def follow(self) -> None:
        async with await self.b.service.start(self.any(), ExecCall(("wait",), session="s")):
            await self.turns()

    async def look(self) -> None:
        async with await self.b.service.terminal(self.any()):
            await self.turns()

    async def renew(self) -> None:
        await self.b.service.set_timeout(self.any(), self.dice.choice([0.5, 100.0]))

    async def delete(self) -> None:
        await self.b.service.delete(self.any())

    async def die(self) -> None:
        id = self.any()
        if id in self.b.world.agents:
            self.b.world.kill(id)

    async def reap(self) -> None:
        self.b.clock.pass_time(0.3)
        await self.b.service.reaper.expire()

    async def tidy(self) -> None:
        await self.b.service.reaper.tidy()

    async def caller(self) -> None:
        acts: list[Callable[[], Awaitable[None]]] = [
            self.create, self.create, self.exec, self.exec, self.wait, self.follow, self.look,
            self.renew, self.delete, self.die, self.reap, self.tidy,
        ]  # fmt: skip
        for _ in range(STEPS):
            act = asyncio.ensure_future((self.dice.choice(acts) if self.ids else self.create)())
            await self.turns()
            if self.dice.random() < 0.3 or not await _soon(act):
                act.cancel()
                await asyncio.wait({act})
            if not act.cancelled() and not isinstance(act.exception(), CapsuleError):
                act.result()


def _until_killed(run: FakeExec) -> None:
    pass


async def _soon(act: asyncio.Future[None]) -> bool:
    """Whether it ended by itself, given some turns of the loop: what waits for ever does not."""
    for _ in range(200):
        if act.done():
            return True
        await asyncio.sleep(0)
    return False


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_left_of_anything(tmp_path: Path, seed: int) -> None:
    world = World()
    provider = FakeProvider(world)
    async with bench(
        tmp_path, world=world, provider=provider, max_sandboxes=12, max_execs=10, drain_timeout=0.0
    ) as b:
        chaos = Chaos(b, random.Random(seed))
        provider.before_launch = provider.after_launch = chaos.crooked
        provider.before_destroy = provider.before_adopt = chaos.crooked
        await asyncio.gather(*(chaos.caller() for _ in range(CALLERS)))
        assert len(chaos.ids) > 10
        provider.before_destroy = provider.before_adopt = _fine
        await delete_all(b)
        assert_nothing_left(b)


async def _fine(_: SandboxId) -> None:
    pass


async def delete_all(b: Bench) -> None:
    for sandbox in b.service.list():
        with suppress(GoneError):  # one whose creator left may end just now
            await b.service.delete(sandbox.id)
    await b.service.reaper.tidy()
    tasks = (b.service._sandboxes._tasks, b.service._execs._left)
    await eventually(lambda: not any(map(len, tasks)), what="nothing is under way")


def assert_nothing_left(b: Bench) -> None:
    service, world = b.service, b.world
    assert service.list() == [] and service._sandboxes.unremoved == {}
    assert not any(service._sandboxes.counts.values())
    assert service._execs.permits.taken == 0
    assert service._terminals._viewers == {}
    assert world.agents == {}
    assert not any(world.connections.values())
