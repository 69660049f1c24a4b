"""How often others have their turn while something is under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Turns:
    count: int = 0


@asynccontextmanager
async def turns_of_others() -> AsyncIterator[Turns]:
    turns = Turns()

    async def take() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take())
    try:
        yield turns
    finally:
        other.cancel()
        await asyncio.wait({other})
