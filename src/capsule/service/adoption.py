"""What a server does with the sandboxes that the last one left.

Recorded and alive: adopted. Recorded, and the box is gone: it failed. Half made or half removed:
removed. A box without a record: removed. A provider that cannot say yet is asked again by the
pulse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import structlog

from capsule.errors import CapsuleError
from capsule.model import Handle, State
from capsule.providers.contract import Box, Pausable
from capsule.service.entry import Entry, Record
from capsule.service.sandboxes import Parts, Sandboxes

log = structlog.get_logger(__name__)
T = TypeVar("T")

AT_ONCE = 16
BUDGET = 20.0


async def adopt_all(parts: Parts, sandboxes: Sandboxes) -> None:
    records = await parts.store.load()
    for record in records:
        sandboxes.enter(Entry.of(record, parts.clock, sandboxes.boot))
    await _each(records, lambda record: _adopt(parts, sandboxes, record))
    await remove_orphans(parts, sandboxes)
    log.info("took up sandboxes", recorded=len(records), running=sandboxes.counts[State.RUNNING])


async def _adopt(parts: Parts, sandboxes: Sandboxes, record: Record) -> None:
    entry = sandboxes.entries[record.id]
    if record.state in (State.CREATING, State.STOPPING):
        # Nobody was told that it runs, or somebody was told that it would end.
        await _end(sandboxes, entry, "the server was restarted while it was " + str(record.state))
        return
    provider = parts.providers.get(record.provider)
    if provider is None:
        log.warning("provider is not set up any more", sandbox=record.id, provider=record.provider)
        return
    if record.state is State.FAILED:
        return
    try:
        async with asyncio.timeout(BUDGET):
            box = await provider.adopt(entry.box_handle())
    except (CapsuleError, OSError, TimeoutError) as error:
        log.warning("box not reached yet", sandbox=record.id, reason=str(error))
        return
    if box is None:
        await sandboxes.fail(entry, "its box was gone when the server came back")
    else:
        entry.take(box)
        await _pause_again(entry, box)


async def _pause_again(entry: Entry, box: Box) -> None:
    """The last server may have been killed before it had paused it, or when it had resumed it."""
    if entry.state is not State.PAUSED or not isinstance(box, Pausable):
        return
    try:
        async with asyncio.timeout(BUDGET):
            await box.pause()
    except (CapsuleError, TimeoutError) as error:
        log.warning("box not paused again", sandbox=entry.id, reason=str(error))


async def _end(sandboxes: Sandboxes, entry: Entry, reason: str) -> None:
    was_creating = entry.state is State.CREATING
    try:
        await sandboxes.end(entry, reason)
    except CapsuleError as error:
        log.warning("sandbox not removed yet", sandbox=entry.id, reason=error.message)
        return
    if was_creating and entry.key is not None:
        await sandboxes.remove(entry.id, entry.used_key)  # a retry may use its key


async def remove_orphans(parts: Parts, sandboxes: Sandboxes) -> bool:
    """Boxes that carry our label and belong to no sandbox, or to one that failed. A record is made
    before its box, so a box without one is nobody's, however new it is.

    False: there may be more, but a provider cannot say.
    """
    orphans: list[Handle] = []
    complete = True
    for provider in parts.providers.values():
        before, pooled = sandboxes.by_box(), set(sandboxes.pool.held)
        try:
            owned = [handle async for handle in provider.owned()]
        except (CapsuleError, OSError) as error:
            log.warning("cannot list boxes", provider=provider.name, reason=str(error))
            complete = False
            continue
        # What was made during the listing is somebody's, and what was deleted was.
        held, pooled = {**before, **sandboxes.by_box()}, pooled | sandboxes.pool.held
        orphans += [
            handle
            for handle in owned
            if handle.sandbox_id not in pooled and _nobodys(held.get(handle.sandbox_id))
        ]
    await _each(orphans, lambda handle: _discard(parts, sandboxes, handle))
    return complete


def _nobodys(entry: Entry | None) -> bool:
    return entry is None or (entry.state is State.FAILED and entry.ending is None)


async def _discard(parts: Parts, sandboxes: Sandboxes, handle: Handle) -> None:
    try:
        async with asyncio.timeout(BUDGET):
            await parts.providers[handle.provider].discard(handle)
        sandboxes.box_is_gone(handle.sandbox_id)
        log.warning("removed a box without a sandbox", box=handle.sandbox_id)
    except (CapsuleError, TimeoutError) as error:
        sandboxes.tidy_soon()
        log.warning("box not removed yet", box=handle.sandbox_id, reason=str(error))


async def _each(items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """A few at a time."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
