"""Memory for large answers: taken in turn, given back in every case."""

from __future__ import annotations

import asyncio

import pytest

from capsule.errors import UnavailableError
from capsule.service import room
from capsule.service.room import Room, holding
from tests.support import eventually


async def test_what_does_not_fit_waits_for_its_turn() -> None:
    space, order = Room(10), list[str]()
    leave = {name: asyncio.Event() for name in "abc"}

    async def hold(name: str, size: int) -> None:
        with holding():
            await space.take(size)
            order.append(name)
            await leave[name].wait()

    tasks = [
        asyncio.create_task(hold(name, size)) for name, size in zip("abc", (8, 8, 1), strict=True)
    ]
    await eventually(lambda: order == ["a"], what="the first has it")
    leave["a"].set()
    await eventually(lambda: order == ["a", "b", "c"], what="the others, in their order")
    leave["b"].set()
    leave["c"].set()
    await asyncio.gather(*tasks)
    assert space.taken == 0


async def hold(space: Room, size: int, until: asyncio.Event) -> None:
    with holding():
        await space.take(size)
        await until.wait()


async def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE", 0.01)
    space, done = Room(10), asyncio.Event()
    first = asyncio.create_task(hold(space, 10, done))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="no memory for a large answer"):
        await hold(space, 10, done)
    done.set()
    await first
    assert space.taken == 0
