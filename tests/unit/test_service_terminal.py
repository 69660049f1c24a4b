"""Who may watch a shell, and what is left of those who do not get that far."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from capsule.errors import CapacityError
from capsule.link.exec_stream import ExecStream
from capsule.model import SandboxId
from capsule.service import CreateRequest, TerminalSession
from capsule.service.terminal import MAX_VIEWERS
from tests.support import eventually
from tests.unit.service_double import Bench, FakeExec, bench


def _shell(run: FakeExec) -> None:
    """Runs until somebody ends it."""


async def with_shell(b: Bench) -> SandboxId:
    id = (await b.service.create(CreateRequest())).id
    b.world.agents[id].programs["/bin/bash"] = _shell
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


async def test_a_viewer_that_leaves_while_it_joins_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()

    async def never(stream: ExecStream, rows: int, cols: int) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with bench(tmp_path) as b:
        id = await with_shell(b)
        async with await b.service.terminal(id):
            before = len(b.world.connections[id])
            monkeypatch.setattr(ExecStream, "resize", never)
            joining = asyncio.create_task(b.service.terminal(id))
            await reached.wait()
            joining.cancel()
            await asyncio.wait({joining})
            await eventually(lambda: len(b.world.connections[id]) == before, what="it is closed")
