"""The sandboxes of this server: their states, and the way from one to the next.

Tasks, all owned by `Sandboxes` and ended by `aclose`:
  launch ID   one per sandbox being created. The caller of `create` waits for it; without an
              idempotency key it is cancelled with its caller, with one it goes on for the retry
  end ID      one per sandbox being deleted, whoever asked first; everybody else waits for the same
  leave ID    waits for the end of a sandbox whose creator has left
  scrap ID    clears away what is left of a box that failed

One loop changes all of this, so what happens between two awaits is whole: that, and not a lock,
is what makes a renewal beat the reaper, or the reaper the renewal, and never half of each.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from capsule.config import Config
from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    GoneError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from capsule.model import Layer, SandboxId, SandboxSpec, State, VolumeMount
from capsule.providers.cleanup import finish
from capsule.providers.contract import Provider
from capsule.service import validate
from capsule.service.admission import Admission, create_fingerprint, spec_of
from capsule.service.beginning import begin
from capsule.service.caller import ASIDE, DEFAULT_TENANT
from capsule.service.clock import Clock
from capsule.service.context import ContextRecord
from capsule.service.entry import MOVES, Entry, Used, over
from capsule.service.former import Former
from capsule.service.happenings import Happening, Happenings, Kind
from capsule.service.pool import Pool
from capsule.service.room import Room
from capsule.service.store import Claim, Store, create_scope
from capsule.service.tasks import Tasks, outcome
from capsule.service.together import Together
from capsule.service.values import CreateRequest, Sandbox
from capsule.settings import brief

log = structlog.get_logger(__name__)

DESTROY_BUDGET = 30.0
MAX_TOMBSTONES = 10_000
RETRY = 5.0

_LIVE = (State.CREATING, State.RUNNING, State.PAUSED, State.STOPPING)


@dataclass(frozen=True, slots=True)
class Parts:
    """What every module of the service shares."""

    config: Config
    providers: Mapping[str, Provider]
    store: Store
    clock: Clock
    room: Room  # for large answers
    happenings: Happenings


class Tombstone(NamedTuple):
    reason: str
    tenant: str


class Sandboxes:
    def __init__(self, parts: Parts, admission: Admission, pool: Pool) -> None:
        self.entries: dict[SandboxId, Entry] = {}
        self.counts: Counter[State] = Counter()
        self.draining = False
        # What becomes of an interpreter that runs in a ready box; told by whoever has contexts.
        self.inherit: Callable[[Entry, ContextRecord], Awaitable[None]] = _leave
        self.check: Callable[[Entry], None] = _pass  # told when tenants have quotas
        self.ended: Callable[[Entry], None] = _pass  # told when snapshots are known
        self.parted: Callable[[Entry, Former], None] = _pass
        self.boot = ""  # which one this is; told when the service opens
        # Gone, but not yet from the store; and the keys that become free with them.
        self.unremoved: dict[SandboxId, Used | None] = {}
        self.tidy_at = math.inf  # monotonic: when something is to be cleared away again
        self.pool = pool
        pool.tidy_soon = self.tidy_soon
        self._parts = parts
        self._store = parts.store
        self._clock = parts.clock
        self._admission = admission
        self._tombstones: OrderedDict[SandboxId, Tombstone] = OrderedDict()
        self._tasks = Tasks()

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def move(self, entry: Entry, to: State, reason: str = "") -> None:
        """The only place where a state changes. Raises WrongStateError."""
        if to not in MOVES[entry.state]:
            raise WrongStateError(
                f"sandbox {entry.id} is {entry.state} and cannot become {to}",
                sandbox_id=entry.id,
                state=str(entry.state),
            )
        self.counts[entry.state] -= 1
        self.counts[to] += 1
        entry.state = to
        entry.reason = reason or entry.reason
        if to is State.GONE:
            self._bury(entry)

    def _tell(self, kind: Kind, entry: Entry) -> None:
        if entry.tenant == ASIDE:
            return
        self._parts.happenings.tell(
            Happening(
                kind,
                self._clock.now(),
                sandbox=entry.id,
                template=entry.template.name,
                provider=entry.provider,
                tenant=entry.tenant,
                reason=entry.reason,
            )
        )

    def enter(self, entry: Entry) -> None:
        """Register one that is new, or known from the store."""
        self.entries[entry.id] = entry
        self.counts[entry.state] += 1

    def by_box(self) -> dict[SandboxId, Entry]:
        """Whose a box is, by the id that its provider knows it by."""
        return {entry.box_id: entry for entry in self.entries.values()}

    def _bury(self, entry: Entry) -> None:
        del self.entries[entry.id]
        entry.end()
        self.ended(entry)
        self.counts[State.GONE] -= 1
        self.remember_end(entry.id, entry.reason, entry.tenant)

    def remember_end(self, id: SandboxId, reason: str, tenant: str) -> None:
        """So that late callers learn that it existed, and why it is over."""
        self._tombstones[id] = Tombstone(reason, tenant)
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def find(self, id: str, tenant: str | None = None) -> Entry:
        """Raises NotFoundError, GoneError. One of another tenant does not exist, nor has it
        existed; without a tenant they are all the same."""
        entry_id = SandboxId(id)
        entry = self.entries.get(entry_id)
        if entry is not None and tenant in (None, entry.tenant):
            return entry
        ended = self._tombstones.get(entry_id)
        if entry is None and ended is not None and tenant in (None, ended.tenant):
            raise over(entry_id, ended.reason)
        raise NotFoundError(
            f"sandbox {brief(id)} does not exist",
            hint="it may have ended long ago; list shows what there is",
            sandbox_id=str(id)[:80],
        )

    def list(
        self,
        *,
        metadata: Mapping[str, str] | None = None,
        state: State | None = None,
        tenant: str | None = None,
    ) -> list[Sandbox]:
        wanted = (metadata or {}).items()
        return [
            entry.view()
            for entry in self.entries.values()
            if (state is None or entry.state is state)
            and (entry.tenant == tenant or (tenant is None and entry.tenant != ASIDE))
            and wanted <= entry.metadata.items()
        ]

    async def create(
        self,
        request: CreateRequest,
        *,
        layers: tuple[Layer, ...] = (),
        tenant: str = DEFAULT_TENANT,
        volumes: tuple[VolumeMount, ...] = (),
        group: Together | None = None,
    ) -> Sandbox:
        """`volumes`: beside what the request asks for, whosever they are."""
        if self.draining:
            raise UnavailableError("the server is stopping", hint="try again in a few seconds")
        entry = self._admission.admit(request, layers, tenant)
        entry.volumes += volumes
        if entry.key is None:
            self._begin(entry, None, group or Together(1))
            return await self._launched(entry)
        return await self._create_once(entry, entry.key, create_fingerprint(request))

    async def _create_once(self, entry: Entry, key: str, mark: str) -> Sandbox:
        scope = create_scope(entry.tenant)
        held = await self._store.find(scope, key)
        if held is None:
            claim = Claim(scope, key, mark, entry.id, self._clock.now())
            self._begin(entry, claim, Together(1))
            try:
                return await self._launched(entry)
            except ConflictError:
                held = await self._store.find(scope, key)
                if held is None:
                    raise
        return await self._launched(self._first(held, mark))

    def _first(self, held: Claim, mark: str) -> Entry:
        """The sandbox that a key has made."""
        if held.fingerprint != mark:
            raise ConflictError(
                f"idempotency_key {brief(held.key)} was used for another request",
                hint="take a new key for a new sandbox",
                sandbox_id=held.target,
            )
        id = SandboxId(held.target)
        if (first := self.entries.get(id)) is not None:
            return first
        if self.unremoved.get(id) is not None:
            raise UnavailableError(
                f"idempotency_key {brief(held.key)}: its create failed and is not undone yet",
                hint=f"try again in {RETRY:g} seconds; if the server's disk is full, free space",
                sandbox_id=id,
            )
        ended = self._tombstones.get(id, Tombstone("it has ended", ""))
        raise GoneError(
            f"idempotency_key {brief(held.key)} made sandbox {id}: {ended.reason}",
            hint="take a new key for a new sandbox",
            sandbox_id=id,
        )

    def _begin(self, entry: Entry, claim: Claim | None, group: Together) -> None:
        live, most = sum(self.counts[s] for s in _LIVE), self._parts.config.max_sandboxes
        if live >= most:
            raise CapacityError(
                f"all sandboxes are taken: {live}, limit {most}",
                retry_after=self._soonest_end(),
                hint="delete one, or wait for one to end",
                limit=most,
            )
        self.check(entry)
        self.enter(entry)
        entry.launching = self._tasks.spawn(self._launch(entry, claim, group), f"launch {entry.id}")

    def _soonest_end(self) -> float:
        first = min((entry.deadline for entry in self.entries.values()), default=0.0)
        return min(max(first - self._clock.monotonic(), 1.0), 60.0)

    async def _launched(self, entry: Entry) -> Sandbox:
        launching = entry.launching
        if launching is not None:
            try:
                await asyncio.wait({launching})
            except asyncio.CancelledError:
                if entry.key is None:
                    self._tasks.spawn(self.end(entry, "its creator left"), f"leave {entry.id}")
                raise
            if launching.cancelled():
                raise over(entry.id, entry.reason)
            launching.result()
        return entry.view()

    async def _launch(self, entry: Entry, claim: Claim | None, group: Together) -> None:
        """Recorded first: whenever a box may exist, a restarted server knows of it.

        Raises ConflictError when the claim's key was taken meanwhile.
        """
        try:
            spec = spec_of(entry)
            self.pool.expect(entry.provider, spec)
            await self._store.save(entry.record(self.boot), claim=claim)
        except BaseException:
            self._forget(entry)
            raise
        try:
            await self._launch_box(entry, spec)
            await group.join(entry, self._save_running)
        except BaseException:
            await finish(self._undo(entry), f"launch {entry.id}", budget=DESTROY_BUDGET)
            raise
        entry.active = entry.checked = self._clock.monotonic()
        entry.launching = None
        self.move(entry, State.RUNNING)
        self._tell(Kind.CREATED, entry)

    async def _save_running(self, entries: Sequence[Entry]) -> None:
        await self._store.save(*(e.record(self.boot, state=State.RUNNING) for e in entries))

    async def _launch_box(self, entry: Entry, spec: SandboxSpec) -> None:
        got = await self.pool.obtain(entry.provider, spec, entry.box_id)
        entry.take(got.box, got.started)
        self.pool.hand_over(got.box)
        await begin(entry)
        if got.context is not None:
            await self.inherit(entry, got.context)

    async def _undo(self, entry: Entry) -> None:
        """After a launch that failed: no box, no record, and its key may be used again."""
        try:
            await self._destroy_box(entry)
        except BaseException:
            self.tidy_soon()  # a box that is left after all is an orphan from here on
            raise
        finally:
            await self.remove(entry.id, entry.used_key)
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        entry.launching = None
        entry.reason = entry.reason or "it could not be created"
        self.move(entry, State.GONE)

    async def delete(self, id: str, reason: str = "it was deleted") -> None:
        await self.end(self.find(id), reason)

    async def end(self, entry: Entry, reason: str, kind: Kind = Kind.DELETED) -> None:
        """Returns when nothing is left of it. It has begun to end before the first await."""
        if entry.ending is None:
            entry.reason = reason if entry.state is not State.FAILED else entry.reason
            entry.ending = self._tasks.spawn(self._end(entry, reason, kind), f"end {entry.id}")
        await outcome(entry.ending)

    async def _end(self, entry: Entry, reason: str, kind: Kind) -> None:
        try:
            if entry.launching is not None:
                entry.launching.cancel()
                await asyncio.wait({entry.launching})
            while entry.resetting is not None:
                entry.resetting.cancel()
                await asyncio.wait({entry.resetting})
            if entry.state is State.GONE:
                return  # it had not been launched, and has cleaned up after itself
            if entry.state is not State.STOPPING:
                announced = entry.state is not State.CREATING  # a killed server was making it
                self.move(entry, State.STOPPING, reason)
                await self.note(entry)  # first, or after a kill in between it is told again
                if announced:
                    self._tell(kind, entry)
            await self._destroy_box(entry)
        except BaseException:
            # It stays `stopping`; the reaper, the next delete or the next start tries again.
            entry.ending = None
            entry.retry_at = self._clock.monotonic() + RETRY
            raise
        await self.remove(entry.id)
        self.move(entry, State.GONE)

    async def _destroy_box(self, entry: Entry) -> None:
        try:
            async with asyncio.timeout(DESTROY_BUDGET):
                if entry.box is not None:
                    await entry.box.destroy()
                elif (provider := self._parts.providers.get(entry.provider)) is not None:
                    await provider.discard(entry.box_handle())
                for former in list(entry.formers):
                    await self._destroy_former(entry, former)
        except TimeoutError:
            raise UnavailableError(
                f"sandbox {entry.id} could not be removed within {DESTROY_BUDGET:g} seconds",
                hint="it is tried again; so may you",
                sandbox_id=entry.id,
            ) from None

    async def _destroy_former(self, entry: Entry, former: Former) -> None:
        await asyncio.wait({former.removal})
        if not former.removed:
            await self._parts.providers[entry.provider].discard(former.handle)
            self._forget_former(entry, former, removed=True)

    async def remove(self, id: SandboxId, key: Used | None = None) -> None:
        """From the store; if that does not work now, the reaper tries later. `key` becomes free."""
        self.unremoved[id] = key
        try:
            await self._store.remove(id)
            if key is not None:
                await self._store.release(create_scope(key.tenant), key.key)
            self.unremoved.pop(id, None)  # the reaper may have been at it too
        except (UnavailableError, NoSpaceError) as error:
            self.tidy_soon()
            log.warning("record not removed yet", sandbox=id, reason=error.message)

    def part(self, entry: Entry, former: Former) -> None:
        """Its box is nobody's from now on, and remembered until nothing of it is left."""
        entry.formers.add(former)
        former.removal.add_done_callback(lambda _: self._forget_former(entry, former))

    def _forget_former(self, entry: Entry, former: Former, *, removed: bool = False) -> None:
        if (removed or former.removed) and former in entry.formers:
            entry.formers.discard(former)
            self.parted(entry, former)

    def box_is_gone(self, box_id: SandboxId) -> None:
        """One that could not be removed when its sandbox parted with it."""
        for entry in self.entries.values():
            for former in [each for each in entry.formers if each.handle.sandbox_id == box_id]:
                self._forget_former(entry, former, removed=True)

    def tidy_soon(self) -> None:
        """Something was left behind: let the reaper look before its time."""
        self.tidy_at = min(self.tidy_at, self._clock.monotonic() + RETRY)

    async def keep(self, entry: Entry) -> None:
        await self._store.save(entry.record(self.boot))

    async def note(self, entry: Entry) -> None:
        """Record what a restart would find out by itself: worth trying, not worth failing."""
        try:
            await self._store.save(entry.record(self.boot))
        except (UnavailableError, NoSpaceError) as error:
            log.warning("state not recorded", sandbox=entry.id, reason=error.message)

    async def fail(self, entry: Entry, reason: str) -> None:
        """Its box is dead. It stays visible, with the reason, until it is deleted or expires."""
        if entry.state not in (State.RUNNING, State.PAUSED):
            return
        log.warning("sandbox failed", sandbox=entry.id, reason=reason)
        self.move(entry, State.FAILED, reason)
        entry.link = None
        entry.end()
        self._tasks.spawn(self._scrap(entry), f"scrap {entry.id}")
        await self.note(entry)
        self._tell(Kind.FAILED, entry)

    async def _scrap(self, entry: Entry) -> None:
        try:
            await self._destroy_box(entry)
        except CapsuleError as error:
            self.tidy_soon()
            log.warning("box not removed yet", sandbox=entry.id, reason=error.message)

    async def set_timeout(self, id: str, ttl: float) -> Sandbox:
        ttl = validate.seconds("ttl", ttl, 0.0, self._parts.config.max_ttl)
        return await self._renew(self.find(id), ttl, ttl)

    async def extend(self, id: str, ttl: float) -> Sandbox:
        """It ends no earlier than `ttl` seconds from now."""
        entry = self.find(id)
        ttl = validate.seconds("ttl", ttl, 0.0, self._parts.config.max_ttl)
        left = entry.deadline - self._clock.monotonic()
        if ttl <= left and entry.state in (State.RUNNING, State.PAUSED) and not entry.ending:
            return entry.view()
        return await self._renew(entry, max(left, ttl), max(entry.ttl, ttl))

    async def annotate(self, id: str, notes: Mapping[str, str]) -> None:
        """Instead of the notes it had under these names."""
        entry = self.find(id)
        if entry.state in (State.STOPPING, State.FAILED) or entry.ending:
            raise entry.refusal()
        before = entry.notes
        entry.notes = {**before, **notes}
        try:
            await self.keep(entry)
        except BaseException:
            entry.notes = before
            raise

    async def keep_alive(self, id: str) -> Sandbox:
        entry = self.find(id)
        left = entry.deadline - self._clock.monotonic()
        return await self._renew(entry, max(left, entry.ttl), entry.ttl)

    async def _renew(self, entry: Entry, left: float, ttl: float) -> Sandbox:
        if entry.state not in (State.CREATING, State.RUNNING, State.PAUSED) or entry.ending:
            raise entry.refusal()
        before = (entry.deadline, entry.expires, entry.ttl, entry.active)
        # In memory first: from here on the reaper leaves it alone.
        now = self._clock.monotonic()
        entry.deadline, entry.expires = now + left, self._clock.now() + left
        entry.ttl, entry.active = max(ttl, 1.0), now
        try:
            if entry.launching is None:
                await self._store.save(entry.record(self.boot))
        except BaseException:
            entry.deadline, entry.expires, entry.ttl, entry.active = before
            raise
        return entry.view()


async def _leave(entry: Entry, context: ContextRecord) -> None:
    """It runs on, and nobody knows of it."""


def _pass(*_: object) -> None:
    pass
