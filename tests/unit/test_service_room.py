"""Memory for large answers: taken in turn, given back in every case."""

from __future__ import annotations

import asyncio

import pytest

from capsule.errors import UnavailableError
from capsule.service import room
from capsule.service.room import Room, holding
from tests.support import eventually


async def test_what_fits_is_taken_at_once_and_given_back() -> None:
    space = Room(10)
    with holding():
        await space.take(6)
        assert space.taken == 6
    assert space.taken == 0


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


async def test_what_is_larger_than_the_room_gets_all_of_it() -> None:
    space = Room(10)
    with holding():
        await asyncio.wait_for(space.take(1000), 1)
    assert space.taken == 0


async def test_a_block_inside_another_gives_back_with_it() -> None:
    space = Room(10)
    with holding():
        with holding():
            await space.take(4)
        assert space.taken == 4
    assert space.taken == 0


async def test_whoever_holds_some_does_not_wait_for_more() -> None:
    space = Room(10)
    with holding():
        for _ in range(5):
            await asyncio.wait_for(space.take(8), 1)
    assert space.taken == 0


async def test_two_rooms_do_not_mix() -> None:
    one, other = Room(10), Room(10)
    with holding():
        await one.take(10)
        await other.take(10)
        assert (one.taken, other.taken) == (10, 10)
    assert (one.taken, other.taken) == (0, 0)


async def hold(space: Room, size: int, until: asyncio.Event) -> None:
    with holding():
        await space.take(size)
        await until.wait()


async def test_who_leaves_the_queue_keeps_nobody_waiting() -> None:
    space, done = Room(10), asyncio.Event()
    first = asyncio.create_task(hold(space, 5, done))
    await asyncio.sleep(0)
    large = asyncio.create_task(hold(space, 9, done))
    await asyncio.sleep(0)
    small = asyncio.create_task(hold(space, 1, done))
    await asyncio.sleep(0)
    assert space.taken == 5, "nobody overtakes"
    large.cancel()
    await eventually(lambda: space.taken == 6, what="the small one has it")
    done.set()
    await asyncio.gather(first, small)
    assert space.taken == 0


async def test_a_cancelled_turn_is_given_back() -> None:
    """Its turn comes in the same round of the loop in which it is cancelled."""
    space, done = Room(10), asyncio.Event()
    first = asyncio.create_task(hold(space, 10, done))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(hold(space, 10, asyncio.Event()))
    await asyncio.sleep(0)
    done.set()
    await first
    assert space.taken == 10, "it has become its turn"
    waiting.cancel()
    await asyncio.wait({waiting})
    assert space.taken == 0


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


async def test_what_a_task_takes_after_its_request_was_over_is_not_counted() -> None:
    space, go = Room(10), asyncio.Event()

    async def late() -> None:
        await go.wait()
        await space.take(7)

    with holding():
        task = asyncio.create_task(late())
        await asyncio.sleep(0)
    go.set()
    await task
    assert space.taken == 0


async def test_without_a_block_nothing_is_counted() -> None:
    space = Room(10)
    await space.take(100)
    assert space.taken == 0
