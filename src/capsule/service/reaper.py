"""Ends what is over: expired, idle, dead and orphaned.

    Service.open ─▶ reaper (one task, ended by Reaper.aclose)
                      ├─ expire   every second: TTL, idle timeout (some are paused then, not ended),
                      │           what could not be removed before
                      ├─ pulse    every half second: boxes that have not answered for a while
                      ├─ trim     every second: the store's log, when much was written
                      └─ tidy     every minute: orphans, records not removed yet, the store;
                                  what could not be removed when it should have been, sooner

Ends run as tasks of `Sandboxes`, a few at a time, so that a box that does not want to go holds
up no other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import structlog

from capsule.errors import CapsuleError, NotSupportedError
from capsule.model import State
from capsule.service.adoption import remove_orphans
from capsule.service.entry import Entry
from capsule.service.happenings import Kind
from capsule.service.pausing import Pausing
from capsule.service.pulse import Pulse
from capsule.service.sandboxes import RETRY, Parts, Sandboxes
from capsule.service.tasks import Tasks

log = structlog.get_logger(__name__)

ENDS_AT_ONCE = 16
TIDY_EVERY = 60.0
MAX_FAILED = 256  # failed sandboxes kept for their owners to see; the oldest go first
JUMP = 2.0  # seconds by which the wall clock may drift from ours before its times are set anew


class Reaper:
    def __init__(self, parts: Parts, sandboxes: Sandboxes, pulse: Pulse, pausing: Pausing) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._sandboxes = sandboxes
        self._pulse = pulse
        self._pausing = pausing
        self.also: list[Callable[[], Awaitable[None]]] = []  # what else is tidied every minute
        self._tasks = Tasks()
        self._ending: set[Entry] = set()

    def start(self) -> None:
        self._tasks.spawn(self._run(), "reaper")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_forever(self.expire, 1.0))
            group.create_task(_forever(self._pulse.round, 0.5))
            group.create_task(_forever(self._parts.store.trim, 1.0))
            group.create_task(_forever(self.tidy, TIDY_EVERY))

    async def expire(self) -> None:
        """Begin the end of everything that is over. Does not wait for it."""
        now = self._clock.monotonic()
        self._follow_wall_clock(now)
        if self._sandboxes.tidy_at <= now:
            self._sandboxes.tidy_at = math.inf
            self._tasks.spawn(self._clear_away(), "clear away")
        for entry in [e for e in self._sandboxes.entries.values() if self._over(e, now)]:
            if len(self._ending) >= ENDS_AT_ONCE:
                return
            if entry not in self._ending:
                self._ending.add(entry)
                self._tasks.spawn(self._end(entry), f"reap {entry.id}")

    def _over(self, entry: Entry, now: float) -> bool:
        if entry.ending is not None or entry.retry_at > now:
            return False
        return entry.deadline <= now or entry.state is State.STOPPING or _idle(entry, now)

    async def _end(self, entry: Entry) -> None:
        try:
            reason = await self._reason(entry)
            if reason:
                # Whoever renewed it while we asked has won; nobody can between this and the end.
                still = self._over(entry, self._clock.monotonic())
                if still and not await self._paused(entry):
                    await self._sandboxes.end(entry, reason, Kind.EXPIRED)
        except CapsuleError as error:
            entry.retry_at = self._clock.monotonic() + RETRY
            log.warning("sandbox not removed yet", sandbox=entry.id, reason=error.message)
        finally:
            self._ending.discard(entry)

    async def _paused(self, entry: Entry) -> bool:
        """Whether it is to be paused instead of ended, and was."""
        if entry.on_timeout != "pause" or entry.state is not State.RUNNING:
            return False
        try:
            await self._pausing.pause(entry, memory=entry.keep_memory)
        except NotSupportedError as error:
            log.warning("sandbox not paused", sandbox=entry.id, reason=error.message)
            return False
        return True

    async def _reason(self, entry: Entry) -> str:
        now = self._clock.monotonic()
        if entry.state is State.STOPPING:
            return entry.reason
        if entry.deadline <= now:
            if entry.state is State.PAUSED and (entry.held or entry.on_timeout == "pause"):
                kept = self._parts.config.paused_ttl
                return f"its time was over (paused, and kept for paused_ttl: {kept:g} seconds)"
            return f"its time was over (ttl {entry.ttl:g} seconds)"
        if await self._works(entry):
            entry.active = self._clock.monotonic()
            return ""
        return f"nobody used it for {entry.idle_timeout:g} seconds"

    async def _works(self, entry: Entry) -> bool:
        """A program that somebody left running is activity; a forgotten shell is not."""
        if entry.link is None:
            return False
        try:
            return any(x.running and not x.tty for x in await entry.link.execs())
        except CapsuleError:
            return False

    def _follow_wall_clock(self, now: float) -> None:
        """When somebody sets the clock, what people are shown moves with it; the end does not."""
        for entry in self._sandboxes.entries.values():
            expires = self._clock.now() + entry.deadline - now
            if abs(expires - entry.expires) > JUMP:
                entry.expires = expires

    async def tidy(self) -> None:
        await self._remove_rest()
        self._drop_failed()
        for tidy in self.also:
            await tidy()
        await self._parts.store.maintain(self._clock.now())

    async def _clear_away(self) -> None:
        if not await self._remove_rest():
            self._sandboxes.tidy_soon()

    async def _remove_rest(self) -> bool:
        """Records and boxes that could not be removed when it was their time. Whether all of them
        are known."""
        for id, key in list(self._sandboxes.unremoved.items()):
            await self._sandboxes.remove(id, key)
        return await remove_orphans(self._parts, self._sandboxes)

    def _drop_failed(self) -> None:
        surplus = self._sandboxes.counts[State.FAILED] - MAX_FAILED
        failed = [e for e in self._sandboxes.entries.values() if e.state is State.FAILED]
        for entry in failed[: max(surplus, 0)]:
            entry.deadline = self._clock.monotonic()


def _idle(entry: Entry, now: float) -> bool:
    return (
        entry.idle_timeout > 0
        and entry.using == 0
        and entry.state is State.RUNNING
        and now - entry.active >= entry.idle_timeout
    )


async def _forever(work: Callable[[], Awaitable[None]], every: float) -> None:
    """A task root: whatever goes wrong in one round is logged, and the next round comes."""
    while True:
        await asyncio.sleep(every)
        try:
            await work()
        except CapsuleError as error:
            log.warning("round of the reaper failed", reason=error.message)
        except Exception:
            log.exception("round of the reaper failed")
