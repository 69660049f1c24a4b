"""What is in a folder, however much that is: E2B's answer has all of it, or says that it is too
much, and nobody else's request waits while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from capsule.edge.errors import encode
from capsule.errors import TooLargeError
from capsule.model import Detail, FileStat
from capsule.service.files import Files

MOST = 20_000  # entries of an answer
MAX_DEPTH = 128
FEW = 100  # that need no room, and are made in one go
EACH = 1000  # bytes of memory that an entry takes, about


async def listed(
    files: Files, path: str, *, depth: int, detail: Detail | None = None
) -> list[FileStat]:
    """As Go walks: a folder, then what is in it. Folders that the sandbox's user may not read have
    nothing in them. Raises TooLargeError."""
    depth = min(depth, MAX_DEPTH)

    async def first(limit: int) -> tuple[list[FileStat], bool]:
        found = await files.list(path, recursive=depth > 1, depth=depth, limit=limit, detail=detail)
        return found.entries, found.truncated and len(found.entries) >= limit

    entries, more = await first(FEW)
    if more:
        await files.make_room(MOST * EACH)
        entries, more = await first(MOST)
    if more:
        raise TooLargeError(
            f"more than {MOST} entries, limit {MOST}",
            hint="list a smaller folder, or with a smaller depth",
            limit=MOST,
        )
    return sorted(entries, key=lambda each: each.path.split("/"))


async def encoded(entries: list[FileStat], shape: Callable[[FileStat], Any]) -> list[msgspec.Raw]:
    """As JSON, a few at a time."""
    told: list[msgspec.Raw] = []
    for start in range(0, len(entries), FEW):
        if start:
            await asyncio.sleep(0)
        told += [msgspec.Raw(encode(shape(each))) for each in entries[start : start + FEW]]
    return told
