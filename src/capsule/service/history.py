"""What sandboxes used in the last hour, of those that somebody may want to look back on.

`History` owns one task, which sleeps while nobody is followed. However many are, it takes no more
than `PER_SECOND` samples in a second: with a hundred each is looked at every five seconds, with a
thousand every fifty. To be looked at is no activity.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from capsule.errors import CapsuleError
from capsule.model import SandboxId, State, Usage
from capsule.service.clock import Clock
from capsule.service.entry import Entry
from capsule.service.sandboxes import Sandboxes
from capsule.service.tasks import Tasks
from capsule.service.usages import usage_of

INTERVAL = 5.0
PER_SECOND = 20
KEEP = 3600.0
MOST = 720
LEAST = 1.0  # between two samples
WITHIN = 1.0  # for one answer


class Sample(NamedTuple):
    at: float  # wall clock
    cpu_ms: float  # since it was made
    cpus: float  # in use since the sample before
    memory: int | None
    disk: int | None


class History:
    def __init__(self, sandboxes: Sandboxes, clock: Clock) -> None:
        self._sandboxes = sandboxes
        self._clock = clock
        self._kept: dict[SandboxId, deque[Sample]] = {}  # the one to look at next comes first
        self._wanted = asyncio.Event()
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.spawn(self._run(), "history")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def follow(self, id: str) -> None:
        """From now on, for as long as it lives."""
        self._kept.setdefault(SandboxId(id), deque(maxlen=MOST))
        self._wanted.set()

    async def of(self, id: str) -> Sequence[Sample]:
        """Oldest first, the last of now. Raises NotFoundError, GoneError."""
        entry = self._sandboxes.find(id)
        self.follow(id)
        kept = self._kept[entry.id]
        if not kept or abs(self._clock.now() - kept[-1].at) >= LEAST:
            await self._look(entry, kept)
        return tuple(kept)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.gather(*(self._visit(id) for id in self._due()))
            await asyncio.sleep(1.0)

    def _due(self) -> list[SandboxId]:
        """They go to the end of the line."""
        now, due = self._clock.now(), list[SandboxId]()
        for id in list(self._kept):
            kept, entry = self._kept[id], self._sandboxes.entries.get(id)
            if entry is None:
                del self._kept[id]
            elif entry.state is not State.RUNNING or len(due) == PER_SECOND:
                continue
            elif not kept or abs(now - kept[-1].at) >= INTERVAL:  # the clock may be set back
                self._kept[id] = self._kept.pop(id)
                due.append(id)
        if not self._kept:
            self._wanted.clear()
        return due

    async def _visit(self, id: SandboxId) -> None:
        entry, kept = self._sandboxes.entries.get(id), self._kept.get(id)
        if entry is not None and kept is not None:
            await self._look(entry, kept)

    async def _look(self, entry: Entry, kept: deque[Sample]) -> None:
        """Or not, if it does not answer: then there is none of this moment."""
        if entry.state is not State.RUNNING or entry.link is None:
            return
        try:
            async with asyncio.timeout(WITHIN):
                used = await usage_of(entry, entry.link)
        except (CapsuleError, OSError, TimeoutError):
            return
        now = self._clock.now()
        before = kept[-1] if kept else Sample(entry.created, 0.0, 0.0, None, None)
        if kept and abs(now - before.at) < LEAST:  # somebody else has looked meanwhile
            return
        kept.append(_sample(used, before, now))
        while kept and now - kept[0].at > KEEP:
            kept.popleft()


def _sample(used: Usage, before: Sample, now: float) -> Sample:
    cpu = used.cpu_ms or 0.0
    # It has another box since, or somebody has set the clock.
    spent, passed = max(cpu - before.cpu_ms, 0.0), max(now - before.at, 0.001)
    return Sample(now, cpu, spent / 1000 / passed, used.memory_bytes, used.disk_bytes)
