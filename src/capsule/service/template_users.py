"""Which sandboxes need what a template is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from capsule.model import State, Template
from capsule.service.store import SqliteStore

UsedBy = Callable[[Template], Awaitable[Sequence[str]]]


def recorded_users(data_dir: Path) -> UsedBy:
    """For those who have no service: what the records of a server say, be it running or not."""

    async def used_by(template: Template) -> Sequence[str]:
        path = data_dir / "capsule.db"
        if not await asyncio.to_thread(path.exists):
            return []
        store = SqliteStore(path)
        await store.open()
        try:
            records = await store.load()
        finally:
            await store.aclose()
        over = (State.GONE, State.FAILED)
        return [r.id for r in records if r.state not in over and shares(r.template, template)]

    return used_by


def shares(one: Template, other: Template) -> bool:
    """Whether a sandbox of the one needs what the other is made of."""
    if one.name == other.name or (one.image and one.image == other.image):
        return True
    return one.root == other.root and one.root.startswith("image:")
