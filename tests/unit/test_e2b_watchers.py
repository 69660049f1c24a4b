"""A watcher that nobody asks ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from capsule.edge.e2b import watchers
from capsule.edge.e2b.watchers import Kept, Watched, Watchers


class Quiet:
    """Of a folder in which nothing happens."""

    closed = False

    async def events(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        await asyncio.Event().wait()
        yield None

    async def aclose(self) -> None:
        self.closed = True


async def test_a_watcher_that_nobody_asks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "UNASKED", 0.05)
    held = Watchers(cast(Any, None), asyncio.Event())
    quiet = Quiet()
    kept = Kept("id", cast(Watched, quiet))
    held._kept["w1"] = kept
    await asyncio.wait_for(held._run("w1", kept), 10)
    assert kept.unasked >= 0.05
    assert not held._kept and quiet.closed
