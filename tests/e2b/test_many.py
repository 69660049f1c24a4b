"""As many streams as one client of E2B opens at once."""

from __future__ import annotations

import asyncio

import pytest
from e2b import AsyncSandbox

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(60)]

STREAMS = 200


async def test_two_hundred_commands_of_one_sandbox_run_at_once(
    async_sandbox: AsyncSandbox,
) -> None:
    await async_sandbox.commands.run("mkfifo /tmp/gate")
    waiting = [
        asyncio.ensure_future(
            async_sandbox.commands.run(
                f"touch /tmp/at-{n}; until [ -e /tmp/go ]; do read -t 1 <>/tmp/gate; done; echo {n}"
            )
        )
        for n in range(STREAMS - 1)  # the last connection is for the question
    ]
    there = f"[ $(ls -d /tmp/at-* | wc -l) -eq {STREAMS - 1} ]"
    await async_sandbox.commands.run(f"until {there}; do sleep 0.1; done; touch /tmp/go")
    done = await asyncio.gather(*waiting)
    assert [each.stdout for each in done] == [f"{n}\n" for n in range(STREAMS - 1)]
