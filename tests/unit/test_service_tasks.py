"""Tasks with an owner: none outlives it, whatever they do when they are told to end."""

from __future__ import annotations

import asyncio

from capsule.service.tasks import Tasks


async def test_what_a_cancelled_task_spawns_is_ended_too() -> None:
    tasks, ended = Tasks(), list[str]()

    async def forever(name: str, then: str = "") -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
            if then:
                tasks.spawn(forever(then), then)

    tasks.spawn(forever("first", then="second"), "first")
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await tasks.aclose()
    assert ended in (["first", "second"], ["first"])  # the second may not even have begun
    assert len(tasks) == 0
