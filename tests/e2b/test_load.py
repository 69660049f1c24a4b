"""As many streams as one client of E2B's opens: 200, over one address."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from e2b import E2B

from tests.e2b.conftest import parameters
from tests.support.servers import RealServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(60)]

STREAMS, SANDBOXES = 200, 4  # a sandbox has at most 64 execs, as the settings are


async def test_two_hundred_streams_are_open_at_once(server: RealServer) -> None:
    e2b = E2B(**parameters(server))  # type: ignore[arg-type]
    boxes = await asyncio.gather(*(e2b.AsyncSandbox.create() for _ in range(SANDBOXES)))
    try:
        each = STREAMS // SANDBOXES
        calls = [
            box.commands.run("exec sleep 1000", background=True, timeout=0)
            for box in boxes
            for _ in range(each)
        ]
        handles = await asyncio.gather(*calls)
        assert len(handles) == STREAMS
        async with httpx.AsyncClient(base_url=server.url) as http:  # the SDK has none left
            for box in boxes:
                found = (await http.get(f"/v1/sandboxes/{box.sandbox_id}/execs")).json()
                assert sum(run["running"] for run in found["execs"]) == each
        for handle in handles:
            await handle.disconnect()
    finally:
        assert all(await asyncio.gather(*(box.kill() for box in boxes)))
