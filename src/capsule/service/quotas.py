"""Holding tenants to what they may use.

How many sandboxes and execs there are is known; CPU time is measured. What an exec has used is
told at its end; what else runs in a sandbox (interpreters, terminals, what execs left behind) is
looked at every few seconds, of those tenants whose CPU time is limited. Who is over it can begin
nothing; what runs goes on to its own end.

Tasks, owned by `Quotas` and ended by `aclose`:
  meter   every few seconds: what sandboxes have used; what tenants have used is written down
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

import structlog

from capsule.config import Config
from capsule.errors import CapacityError, CapsuleError, ForbiddenError
from capsule.model import Layer, State
from capsule.service.accounts import AccountFile
from capsule.service.caller import ASIDE
from capsule.service.clock import Clock
from capsule.service.entry import Entry
from capsule.service.happenings import Happening
from capsule.service.permits import Permits
from capsule.service.sandboxes import Sandboxes
from capsule.service.snapshots import Snapshots
from capsule.service.tasks import Tasks
from capsule.service.tenants import Tenants
from capsule.service.usages import usages
from capsule.service.values import Snapshot
from capsule.service.volumes import Volumes

log = structlog.get_logger(__name__)

LOOK_EVERY = 5.0
MOST_LOOKED_AT = 10_000
_LIVE = (State.CREATING, State.RUNNING, State.PAUSED, State.STOPPING)


@dataclass(frozen=True, slots=True)
class Used:
    sandboxes: int
    execs: int
    memory: int
    cpu_seconds: float | None  # None: not limited, so nobody looks
    storage: int


class Beside(Protocol):
    """Keeps bytes for tenants, beside the service."""

    def of(self, tenant: str) -> int: ...

    def owners(self) -> set[str]: ...


class Quotas:
    def __init__(
        self,
        config: Config,
        tenants: Tenants,
        file: AccountFile,
        clock: Clock,
        sandboxes: Sandboxes,
        permits: Permits,
    ) -> None:
        self._monthly = config.tenant_cpu_period == "month"
        self.tenants = tenants
        self._file = file
        self._clock = clock
        self._sandboxes = sandboxes
        self._permits = permits
        self.snapshots: Snapshots  # told when there are some, as volumes
        self.volumes: Volumes
        self.beside: list[Beside] = []  # who else stores something for tenants
        self._period = ""
        self._cpu: Counter[str] = Counter()  # milliseconds, in this period
        self._unwritten: Counter[str] = Counter()
        self._tasks = Tasks()

    async def open(self) -> None:
        await self.tenants.read()
        await self._turn()
        self._tasks.spawn(self._meter(), "meter")

    async def aclose(self) -> None:
        await self._tasks.aclose()
        await self._write()

    def check_create(self, entry: Entry) -> None:
        """Raises CapacityError, ForbiddenError."""
        if entry.tenant == ASIDE:
            return
        tenant, quota = entry.tenant, self.tenants.quota(entry.tenant)
        self.check_cpu(tenant)
        if not quota.sandboxes and not quota.memory:
            return
        live = self._live(tenant)
        if quota.sandboxes and len(live) >= quota.sandboxes:
            raise self._full(
                f"tenant {tenant} has {len(live)} sandboxes, its quota is {quota.sandboxes}",
                live,
                quota="sandboxes",
                used=len(live),
                limit=quota.sandboxes,
            )
        wanted, used = entry.limits.memory, sum(each.limits.memory for each in live)
        if quota.memory and used + wanted > quota.memory:
            text = (
                f"tenant {tenant} has sandboxes with {used} bytes of memory and asks for {wanted}"
                f" more, its quota is {quota.memory}"
            )
            numbers = {"quota": "memory", "used": used, "asked": wanted, "limit": quota.memory}
            if wanted > quota.memory:
                raise ForbiddenError(text, hint="ask for less memory", **numbers)
            raise self._full(text, live, **numbers)

    def check_exec(self, entry: Entry) -> None:
        """Raises CapacityError."""
        tenant, quota = entry.tenant, self.tenants.quota(entry.tenant)
        running = self._permits.by_tenant[tenant]
        if quota.execs and running >= quota.execs:
            raise CapacityError(
                f"tenant {tenant} runs {running} execs, its quota is {quota.execs}",
                hint="wait for one to end, or kill one",
                quota="execs",
                used=running,
                limit=quota.execs,
            )
        self.check_cpu(tenant)

    def check_cpu(self, tenant: str) -> None:
        """Raises CapacityError."""
        limit = self.tenants.quota(tenant).cpu_seconds
        if not limit or self._now_period() != self._period:
            return
        used = self._cpu[tenant] / 1000
        if used >= limit:
            end = self.period_end()
            word = "month" if self._monthly else "day"
            raise CapacityError(
                f"tenant {tenant} has used {used:.1f} CPU seconds this {word}, its quota is"
                f" {limit:g}",
                retry_after=max(end.timestamp() - self._clock.now(), 1.0),
                hint=f"it is free again at {end:%Y-%m-%dT%H:%M:%SZ}",
                quota="cpu_seconds",
                used=round(used, 1),
                limit=limit,
                free_at=f"{end:%Y-%m-%dT%H:%M:%SZ}",
            )

    def check_snapshot(self, made: Snapshot) -> None:
        """Before it is kept. Raises ForbiddenError."""
        if limit := self.tenants.quota(made.tenant).storage:
            known = [each.layers for each in self.snapshots.charged(made.tenant)]
            before, after = _size(known), _size([*known, made.layers])
            used = before + self._volumes_size(made.tenant) + self._beside(made.tenant)
            self._check_storage(made.tenant, used, after - before, limit)

    def check_volume(self, tenant: str, size: int | None) -> None:
        """Before it is made. Raises ForbiddenError."""
        if limit := self.tenants.quota(tenant).storage:
            if size is None:
                raise ForbiddenError(
                    f"tenant {tenant} has a quota of storage, {limit} bytes, and asks for a volume"
                    " without a size",
                    hint="give its size",
                    quota="storage",
                    limit=limit,
                )
            self._check_storage(tenant, self.storage(tenant), size, limit)

    def _check_storage(self, tenant: str, used: int, asked: int, limit: int) -> None:
        if used + asked > limit:
            raise ForbiddenError(
                f"tenant {tenant} has {used} bytes of snapshots, volumes and files of sessions and"
                f" asks for {asked} more, its quota is {limit}",
                hint="delete some first",
                quota="storage",
                used=used,
                asked=asked,
                limit=limit,
            )

    def storage(self, tenant: str) -> int:
        layers = _size(each.layers for each in self.snapshots.charged(tenant))
        return layers + self._volumes_size(tenant) + self._beside(tenant)

    def storage_left(self, tenant: str) -> int | None:
        """None: it has no quota."""
        limit = self.tenants.quota(tenant).storage
        return max(limit - self.storage(tenant), 0) if limit else None

    def _beside(self, tenant: str) -> int:
        return sum(each.of(tenant) for each in self.beside)

    def _volumes_size(self, tenant: str) -> int:
        return sum(each.size or 0 for each in self.volumes.charged(tenant))

    def used(self, tenant: str) -> Used:
        live = self._live(tenant)
        limited = self.tenants.quota(tenant).cpu_seconds > 0
        return Used(
            sandboxes=len(live),
            execs=self._permits.by_tenant[tenant],
            memory=sum(each.limits.memory for each in live),
            cpu_seconds=round(self._cpu[tenant] / 1000, 3) if limited else None,
            storage=self.storage(tenant),
        )

    def known(self) -> list[str]:
        """Every tenant that has something, or a quota of its own."""
        found = {*self.tenants.named(), *(e.tenant for e in self._sandboxes.entries.values())}
        found |= self.snapshots.owners() | self.volumes.owners()
        found = found.union(*(each.owners() for each in self.beside))
        return sorted(found - {ASIDE})

    def period_end(self) -> datetime:
        now = datetime.fromtimestamp(self._clock.now(), UTC)
        day = now.replace(hour=0, minute=0, second=0, microsecond=0)
        if self._monthly:
            return (day.replace(day=28) + timedelta(days=4)).replace(day=1)
        return day + timedelta(days=1)

    def _live(self, tenant: str) -> list[Entry]:
        entries = self._sandboxes.entries.values()
        return [each for each in entries if each.tenant == tenant and each.state in _LIVE]

    def _full(self, text: str, live: list[Entry], **numbers: object) -> CapacityError:
        now = self._clock.monotonic()
        first = min((each.deadline for each in live), default=now)
        wait = min(max(first - now, 1.0), 60.0)
        hint = "delete one, or wait for one to end"
        return CapacityError(text, retry_after=wait, hint=hint, **numbers)

    def hear(self, happening: Happening) -> None:
        """What an exec has used. What the meter has seen of it while it ran counts once."""
        if happening.exec is None or not self.tenants.any_cpu:
            return
        entry = self._sandboxes.entries.get(happening.sandbox)
        if entry is None:
            self._add(happening.tenant, happening.exec.exit.cpu_ms)
            return
        entry.cpu_of_execs += happening.exec.exit.cpu_ms
        if entry.cpu_seen is None:
            self._add(entry.tenant, happening.exec.exit.cpu_ms)
        else:
            self._see(entry, entry.cpu_of_execs)

    def _see(self, entry: Entry, cpu: float) -> None:
        if entry.cpu_seen is None:  # its box was there before this server: what it used is counted
            entry.cpu_seen = cpu
        elif cpu > entry.cpu_seen:
            self._add(entry.tenant, cpu - entry.cpu_seen)
            entry.cpu_seen = cpu

    def _add(self, tenant: str, cpu: float) -> None:
        if self.tenants.quota(tenant).cpu_seconds:
            self._cpu[tenant] += cpu  # type: ignore[assignment]  # a Counter counts fractions too
            self._unwritten[tenant] += cpu  # type: ignore[assignment]  # as above

    async def _meter(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                await self._turn()
                await self.look()
                await self._write()
            except CapsuleError as error:
                log.warning("use not metered", reason=error.message)

    async def look(self) -> None:
        """At what sandboxes have used by now."""
        entries = self._sandboxes.entries
        limited = [e for e in entries.values() if self.tenants.quota(e.tenant).cpu_seconds]
        for found in await usages(limited, MOST_LOOKED_AT):
            entry = entries.get(found.sandbox)
            if entry is not None and found.usage.cpu_ms is not None:
                self._see(entry, found.usage.cpu_ms)

    async def _turn(self) -> None:
        """To the period that it is now."""
        period = self._now_period()
        if period != self._period:
            await self._write()
            found = await asyncio.to_thread(self._file.cpu_used, period)
            self._cpu = Counter(found)
            self._period = period

    async def _write(self) -> None:
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, Counter()
            try:
                await asyncio.to_thread(self._file.add_cpu, self._period, unwritten)
            except CapsuleError:
                self._unwritten.update(unwritten)  # the next round tries again
                raise

    def _now_period(self) -> str:
        now = datetime.fromtimestamp(self._clock.now(), UTC)
        return f"{now:%Y-%m}" if self._monthly else f"{now:%Y-%m-%d}"


def _size(stacks: Iterable[tuple[Layer, ...]]) -> int:
    """Of layers, of which several may have the same."""
    return sum({layer.id: layer.size for stack in stacks for layer in stack}.values())
