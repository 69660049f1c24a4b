"""Looking at what sandboxes use, of which some end meanwhile and some do not answer."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from capsule.model import State, Usage
from capsule.service import usages as module
from capsule.service.usages import usages

NOTHING = Usage(**{each.name: None for each in fields(Usage)})  # type: ignore[arg-type]


class Answering:
    """As much of a link as is needed; `also` happens while it is asked."""

    def __init__(self, also: Any = None) -> None:
        self._also = also

    async def usage(self) -> Usage:
        if self._also is not None:
            await self._also()
        return NOTHING


def entry(id: str, link: Any) -> Any:
    template = SimpleNamespace(name="bash")
    return SimpleNamespace(id=id, state=State.RUNNING, link=link, box=None, template=template)


async def forever() -> None:
    await asyncio.Event().wait()


async def test_one_that_is_silent_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WITHIN", 0.1)
    found = await usages([entry("1", Answering(forever)), entry("2", Answering())], 10)
    assert [each.sandbox for each in found] == ["2"]


def test_there_are_no_more_tenants_than_there_may_be() -> None:
    small = [SimpleNamespace(tenant=f"t{n}", state=State.RUNNING) for n in range(5)]
    big = [SimpleNamespace(tenant="big", state=State.PAUSED)] * 3
    told: Any = module.by_tenant([*small, *big], 2)  # type: ignore[list-item]
    assert told == {("big", "paused"): 3, ("t0", "running"): 1, ("", "running"): 4}
