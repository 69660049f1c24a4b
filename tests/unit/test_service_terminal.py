"""Who may watch a shell, and what is left of those who do not get that far."""

from __future__ import annotations

import asyncio
from pathlib import Path

from capsule.errors import CapacityError
from capsule.model import SandboxId
from capsule.service import CreateRequest, TerminalSession
from capsule.service.terminal import MAX_VIEWERS
from tests.unit.service_double import Bench, bench


async def with_shell(b: Bench) -> SandboxId:
    id = (await b.service.create(CreateRequest())).id
    b.world.agents[id].programs["/bin/bash"] = lambda run: None  # runs on
    return id


async def test_those_who_come_at_once_count_like_those_who_come_in_turn(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        id = await with_shell(b)
        joins = (b.service.terminal(id) for _ in range(MAX_VIEWERS + 4))
        found = await asyncio.gather(*joins, return_exceptions=True)
        viewers = [each for each in found if isinstance(each, TerminalSession)]
        refused = [each for each in found if isinstance(each, CapacityError)]
        assert (len(viewers), len(refused)) == (MAX_VIEWERS, 4)
        assert len({viewer.exec_id for viewer in viewers}) == 1
        await viewers[0].aclose()
        viewers[0] = await b.service.terminal(id)
        for viewer in viewers:
            await viewer.aclose()
