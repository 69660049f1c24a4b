"""The one object the edges talk to. It puts the parts together; each has its own module.

Service ─┬─ store, providers      opened and closed here
         ├─ sandboxes             owns the tasks that create and end sandboxes
         ├─ pool                  owns ready boxes, and the tasks that launch and remove them
         ├─ resets                owns a task per reset
         ├─ keys, quotas          own one task each
         ├─ reaper ─ pulse        owns one task
         ├─ history               owns one task
         ├─ volume_files          owns a task per volume that is being looked into
         ├─ snapshots             owns nothing that outlives a call
         ├─ execs, terminals, ports   own nothing that outlives a call
         ├─ contexts              owns the tasks of their runs
         ├─ templates             builds are their callers'; owns the task that clears up old ones
         ├─ builds                owns a task per build that nobody waits for
         ├─ locks on data_dir and run_dir, held from open to aclose
         └─ listeners           hear what happens: opened before boxes are adopted, closed after all
"""

from __future__ import annotations

import asyncio
import builtins
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Self

import structlog

from capsule.catalog import Catalog
from capsule.config import Config
from capsule.errors import CapsuleError, UnavailableError
from capsule.model import ExecInfo, State, Template, Usage
from capsule.providers.contract import Capabilities, Measured, Provider
from capsule.providers.ondemand import OnDemand
from capsule.service.access import Access
from capsule.service.accounts import AccountFile
from capsule.service.admission import Admission
from capsule.service.adoption import adopt_all
from capsule.service.builds import Builds
from capsule.service.caller import OPERATOR, Caller
from capsule.service.clock import Clock, SystemClock
from capsule.service.contexts import Contexts
from capsule.service.execs import Begun, Execs
from capsule.service.files import Files
from capsule.service.happenings import Happenings
from capsule.service.history import History
from capsule.service.keys import Keys
from capsule.service.live import LiveExec
from capsule.service.lock import DirectoryLock
from capsule.service.pausing import Pausing
from capsule.service.pool import Pool, PoolStatus
from capsule.service.ports import Ports
from capsule.service.pulse import Pulse
from capsule.service.quotas import Quotas
from capsule.service.reaper import Reaper
from capsule.service.reset import Resets
from capsule.service.restarts import Restarts
from capsule.service.room import Room
from capsule.service.sandboxes import Parts, Sandboxes
from capsule.service.snapshot_moves import SnapshotMoves
from capsule.service.snapshots import Snapshots
from capsule.service.steps import Steps
from capsule.service.store import SqliteStore, Store
from capsule.service.tally import Tally
from capsule.service.templates import Templates, shares
from capsule.service.tenants import Tenants
from capsule.service.terminal import Terminals, TerminalSession
from capsule.service.usages import SandboxUsage, by_tenant, usages
from capsule.service.values import (
    CreateRequest,
    ExecCall,
    ExecResult,
    RunCall,
    Sandbox,
    Stats,
    Terminal,
)
from capsule.service.vault import Vault
from capsule.service.volume_files import VolumeFiles
from capsule.service.volumes import Volumes

log = structlog.get_logger(__name__)


class Service:
    def __init__(
        self,
        config: Config,
        providers: Mapping[str, Provider],
        catalog: Mapping[str, Template],
        clock: Clock | None = None,
        store: Store | None = None,
        happenings: Happenings | None = None,
        listeners: Sequence[AbstractAsyncContextManager[object]] = (),
    ) -> None:
        self.config = config
        self.catalog = catalog = Catalog.of(catalog)
        self._capabilities: dict[str, Capabilities] = {}
        self._clock = clock or SystemClock()
        self._store = store or SqliteStore(config.data_dir / "capsule.db")
        self.happenings = happenings or Happenings()
        self._listeners = listeners
        self.tally = Tally(self.happenings)
        room = Room(config.answer_memory)
        self._parts = Parts(config, providers, self._store, self._clock, room, self.happenings)
        self._drained_by = math.inf  # by the loop's clock
        self._opened = AsyncExitStack()

        # Sandboxes: which there may be, where their boxes come from, how they live and end.
        late = frozenset(n for n, p in providers.items() if isinstance(p, OnDemand))
        admission = Admission(config, catalog, self._capabilities, self._clock, late=late)
        self._pool = Pool(config, providers, catalog, self._clock)
        self.templates = Templates(config, catalog, self._using, let_go=self._pool.let_go)
        self.builds = Builds(self.templates, self._clock)
        self._sandboxes = Sandboxes(self._parts, admission, self._pool)
        self._pulse = Pulse(self._parts, self._sandboxes)
        self._pausing = Pausing(self._parts, self._sandboxes)
        self._resets = Resets(self._parts, self._sandboxes)
        self.reaper = Reaper(self._parts, self._sandboxes, self._pulse, self._pausing)
        self.history = History(self._sandboxes, self._clock)

        # What is done in them.
        self._access = Access(self._sandboxes, self._pulse, self._pausing, self._clock)
        self._execs = Execs(self._parts, self._access)
        permits = self._execs.permits
        self.contexts = Contexts(self._parts, self._access, permits)
        self._sandboxes.inherit = self.contexts.inherit
        self._terminals = Terminals(self._access)
        self.ports = Ports(self._access)

        # What outlives them.
        self.snapshots = Snapshots(self._parts, self._sandboxes)
        admission.snapshot = self.snapshots.find
        self.moves = SnapshotMoves(self._parts, self.snapshots, admission)
        self.steps = Steps(self._parts, self._sandboxes, self.snapshots, self._resets)
        self._execs.mark = self.contexts.mark = self.steps.mark
        self._restarts = Restarts(self.snapshots, self._resets)
        self._pausing.restart = self._restarts.restart
        self.volumes = Volumes(self._parts, self._sandboxes, admission)
        admission.mounts = self.volumes.mounts
        self.volume_files = VolumeFiles(self._parts, self._sandboxes, self._access)
        self.volumes.let_go = self.volume_files.let_go
        self.reaper.also += [self.snapshots.sweep, self.volumes.sweep]

        # Whose all of it is, and how much they may have.
        accounts = AccountFile(config.data_dir)
        self.keys = Keys(accounts, self._clock)
        self.vault = Vault(config.data_dir, self._clock)
        tenants = Tenants(config, accounts)
        self.keys.also.append(tenants.read)
        self.quotas = Quotas(config, tenants, accounts, self._clock, self._sandboxes, permits)
        self.quotas.snapshots, self.quotas.volumes = self.snapshots, self.volumes
        self.happenings.listeners.append(self.quotas.hear)
        self._sandboxes.check, permits.check = self.quotas.check_create, self.quotas.check_exec
        self.snapshots.check = self.quotas.check_snapshot
        self.volumes.check = self.quotas.check_volume

    async def open(self) -> None:
        """Lock the directories, open the providers, adopt what lives, start the reaper.

        Raises ConflictError (another server uses a directory), UnavailableError (a provider does
        not work here, or is weaker than the configured minimum), ForbiddenError, NoSpaceError.
        """
        async with AsyncExitStack() as stack:
            for directory in dict.fromkeys((self.config.data_dir, self.config.run_dir)):
                lock = await asyncio.to_thread(DirectoryLock.acquire, directory)
                stack.callback(lock.close)
            self._sandboxes.boot = await asyncio.to_thread(self._clock.boot_id)
            await self._store.open()
            stack.push_async_callback(self._store.aclose)
            await self.keys.open()
            stack.push_async_callback(self.keys.aclose)
            await self.quotas.open()
            stack.push_async_callback(self.quotas.aclose)
            for listener in self._listeners:
                await stack.enter_async_context(listener)
            for provider in self._parts.providers.values():
                await self._open_provider(provider, stack)
            stack.push_async_callback(self._pool.aclose)
            stack.push_async_callback(self.snapshots.aclose)
            stack.push_async_callback(self._sandboxes.aclose)
            stack.push_async_callback(self._resets.aclose)
            stack.push_async_callback(self.volume_files.aclose)
            stack.push_async_callback(self._execs.aclose)
            stack.push_async_callback(self.contexts.aclose)
            await adopt_all(self._parts, self._sandboxes)
            self._pool.start()
            await self.snapshots.open()
            await self.volumes.open()
            self.reaper.start()
            stack.push_async_callback(self.reaper.aclose)
            self.history.start()
            stack.push_async_callback(self.history.aclose)
            self.templates.start()
            stack.push_async_callback(self.templates.aclose)
            stack.push_async_callback(self.builds.aclose)
            self._opened = stack.pop_all()

    async def _open_provider(self, provider: Provider, stack: AsyncExitStack) -> None:
        try:
            await provider.open()
        finally:
            stack.push_async_callback(provider.aclose)
        if isinstance(provider, OnDemand):
            return
        found = await provider.probe()
        least = self.config.min_isolation
        if found.usable and found.isolation.weaker_than(least):
            raise UnavailableError(
                f"provider {provider.name} isolates by {found.isolation} here, required: {least}",
                hint="see `capsule doctor`, or set a lower CAPSULE_MIN_ISOLATION",
            )
        self._capabilities[provider.name] = found

    def drain(self, within: float) -> None:
        """From now on refuse new sandboxes; what runs has `within` seconds before `aclose` lets go
        of it. A graceful stop begins with this; called again, it can only be sooner.
        """
        self._sandboxes.draining = True
        self._pool.close()
        self._drained_by = min(self._drained_by, asyncio.get_running_loop().time() + within)

    async def aclose(self) -> None:
        """Drain (unless somebody began to, for config.drain_timeout), then let go, or delete
        (config.drain).

        Idempotent. Boxes that are kept go on running, and the next server adopts them.
        """
        self.drain(self.config.drain_timeout)
        try:
            await self._execs.permits.all_free(self._drained_by)
            if self.config.drain == "delete":
                await self._delete_all()
        finally:
            await self._opened.aclose()

    async def _delete_all(self) -> None:
        entries = builtins.list(self._sandboxes.entries.values())
        ends = (self._sandboxes.end(entry, "the server stopped") for entry in entries)
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(error, CapsuleError):
                log.warning("sandbox not removed", reason=error.message)
            elif isinstance(error, BaseException):
                raise error

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def capabilities(self) -> dict[str, Capabilities]:
        """Of the providers that have been opened."""
        late = [p for p in self._parts.providers.values() if isinstance(p, OnDemand)]
        return {**self._capabilities, **{p.name: p.found for p in late if p.found is not None}}

    def stats(self) -> Stats:
        return Stats(
            sandboxes={state: n for state, n in self._sandboxes.counts.items() if n},
            max_sandboxes=self.config.max_sandboxes,
            execs=self._execs.permits.taken,
            max_execs=self.config.max_execs,
            draining=self._sandboxes.draining,
            execs_begun=self._execs.permits.begun,
            started=self._pool.obtained,
        )

    def by_tenant(self, most: int) -> Mapping[tuple[str, State], int]:
        """How many sandboxes there are by tenant and state; see `usages.by_tenant`."""
        return by_tenant(self._sandboxes.entries.values(), most)

    async def usages(self) -> Sequence[SandboxUsage]:
        """Of as many sandboxes as `metrics_sandboxes` says."""
        return await usages(self._sandboxes.entries.values(), self.config.metrics_sandboxes)

    def pool(self) -> PoolStatus:
        """What is ready, and how often it was wanted."""
        return self._pool.status()

    def own(self, caller: Caller, id: str) -> None:
        """Before anything is done with a sandbox for somebody: raises NotFoundError, with the same
        words, where it does not exist and where it is another tenant's; GoneError."""
        self._sandboxes.find(id, caller.tenant)

    async def create(self, request: CreateRequest, caller: Caller = OPERATOR) -> Sandbox:
        """Returns when it runs. Raises InvalidError, TooLargeError, NotFoundError (template),
        CapacityError, ConflictError (the key was used for something else), GoneError (what the key
        made is over), UnavailableError, NoSpaceError."""
        await self.templates.fresh()
        return await self._sandboxes.create(request, tenant=caller.tenant)

    async def _using(self, template: Template) -> Sequence[str]:
        entries = self._sandboxes.entries.values()
        over = (State.GONE, State.FAILED)
        return [e.id for e in entries if e.state not in over and shares(e.template, template)]

    def get(self, id: str) -> Sandbox:
        """Raises NotFoundError, GoneError (it existed, and is over)."""
        return self._sandboxes.find(id).view()

    def ids(self) -> builtins.list[str]:
        """Of all tenants' sandboxes that are not over. As cheap as can be."""
        over = (State.GONE, State.FAILED)
        return [id for id, e in self._sandboxes.entries.items() if e.state not in over]

    def environ(self, id: str) -> Mapping[str, str]:
        """What a program starts with there. Raises NotFoundError, GoneError."""
        return self._sandboxes.find(id).environ

    def list(
        self,
        *,
        metadata: Mapping[str, str] | None = None,
        state: State | None = None,
        tenant: str | None = None,
    ) -> builtins.list[Sandbox]:
        """Newest last; of all tenants if none is named."""
        return self._sandboxes.list(metadata=metadata, state=state, tenant=tenant)

    async def delete(self, id: str) -> None:
        """Returns when nothing is left of it. Concurrent deletes all succeed; one that comes later
        raises GoneError."""
        await self._sandboxes.delete(id)

    async def reset(self, id: str) -> Sandbox:
        """As new, under the same id: programs, files and sessions are gone when this returns. Its
        TTL goes on. Raises CapacityError, UnavailableError, NoSpaceError: it is as it was."""
        return await self._resets.reset(id)

    async def set_timeout(self, id: str, ttl: float) -> Sandbox:
        """It ends `ttl` seconds from now."""
        return await self._sandboxes.set_timeout(id, ttl)

    async def extend(self, id: str, ttl: float) -> Sandbox:
        """It ends no earlier than `ttl` seconds from now."""
        return await self._sandboxes.extend(id, ttl)

    async def annotate(self, id: str, notes: Mapping[str, str]) -> None:
        """Keep these words with it, for whoever wrote them. They mean nothing to the service."""
        await self._sandboxes.annotate(id, notes)

    async def keep_alive(self, id: str) -> Sandbox:
        """It ends no earlier than its own ttl from now."""
        return await self._sandboxes.keep_alive(id)

    async def fork(
        self, id: str, count: int, *, at: int | None = None, ttl: float | None = None
    ) -> builtins.list[Sandbox]:
        """So many sandboxes with its files of this moment, or of a step; all of them or none."""
        if at is None:
            return await self.snapshots.fork(id, count, ttl)
        entry = self._sandboxes.find(id)
        async with self.steps.start(entry, self.steps.find(entry, at)) as layers:
            return await self.snapshots.start_all(entry, layers, count)

    async def pause(self, id: str, *, memory: bool = True, hold: bool = False) -> Sandbox:
        """Its programs stand still and keep all they have, until `resume`; without `memory` they
        end, and its files are kept. With `hold` it is kept for config.paused_ttl, and its ttl
        begins again with the resume."""
        entry = self._sandboxes.find(id)
        await self._pausing.pause(entry, memory=memory, hold=hold)
        return entry.view()

    async def resume(self, id: str, *, memory: bool = True) -> Sandbox:
        """Without `memory` as after a reboot: its files are there, its programs have ended."""
        entry = self._sandboxes.find(id)
        asleep = entry.state is State.PAUSED and entry.pause_kept != "files"
        await self._pausing.resume(entry)
        if asleep and not memory:
            await self._restarts.restart(entry)
        return entry.view()

    async def metrics(self, id: str) -> Usage:
        """Of one that runs: to be looked at wakes nobody. Raises as `exec` for the sandbox."""
        visit = self._access.visit(id)
        visit.entry.running()
        async with visit as link:
            inside = await link.usage()
            box = visit.entry.box
            return await box.measure(inside) if isinstance(box, Measured) else inside

    async def exec(self, id: str, call: ExecCall) -> ExecResult:
        """Raises for the sandbox NotFoundError, GoneError, WrongStateError; for the program
        NotFoundError, ForbiddenError, InvalidError, TooLargeError; CapacityError, ConflictError
        (the key), GoneError with `lost` in its details (a retry whose result is lost),
        UnavailableError (what it did is unknown)."""
        return await self._execs.exec(id, call)

    async def run(self, id: str, call: RunCall) -> ExecResult:
        """As exec; NotFoundError also for the language."""
        return await self._execs.exec(id, call)

    async def start(
        self,
        id: str,
        call: ExecCall | RunCall,
        *,
        stdin_open: bool = False,
        tty: Terminal | tuple[int, int] | None = None,
        flow: bool = False,
    ) -> LiveExec:
        """Returns when the program runs. Closing the stream leaves the program running.

        With an idempotency key that was used before it attaches to that exec, from its start.
        `flow`: whoever reads gets all of its output, however much it is, and the program waits for
        slow readers; little is kept for later ones. Without a timeout it has none.
        """
        return await self._execs.start(id, call, stdin_open=stdin_open, tty=tty, flow=flow)

    async def attach(
        self, id: str, exec_id: str, *, stdout: int = 0, stderr: int = 0, input: bool = False
    ) -> LiveExec:
        """The exec's output from these offsets on, and its exit; also when it ended long ago."""
        return await self._execs.attach(id, exec_id, stdout=stdout, stderr=stderr, input=input)

    async def execs(self, id: str) -> Sequence[ExecInfo]:
        return await self._execs.list(id)

    async def look_at_execs(self, id: str) -> Sequence[Begun]:
        return await self._execs.look(id)

    async def kill(
        self, id: str, exec_id: str, *, signal: str = "KILL", grace: float = 0.0
    ) -> bool:
        """True: it was still running."""
        return await self._execs.kill(id, exec_id, signal=signal, grace=grace)

    async def send_input(self, id: str, exec_id: str, data: bytes, *, eof: bool = False) -> None:
        await self._execs.send_input(id, exec_id, data, eof=eof)

    async def resize(self, id: str, exec_id: str, rows: int, cols: int) -> None:
        await self._execs.resize(id, exec_id, rows, cols)

    async def batch(
        self, id: str, calls: Sequence[ExecCall | RunCall], *, stop_on_error: bool = True
    ) -> Sequence[ExecResult]:
        """In order. With stop_on_error the first that does not exit with 0 is the last result."""
        return await self._execs.batch(id, calls, stop_on_error=stop_on_error)

    def files(self, id: str) -> Files:
        """Raises NotFoundError, GoneError at once."""
        return Files(self._access, self._sandboxes.find(id), self._parts.room)

    async def terminal(
        self, id: str, *, name: str = "main", rows: int = 24, cols: int = 80
    ) -> TerminalSession:
        """Join the named shell, or start it. Raises CapacityError (viewers, shells)."""
        self.quotas.check_cpu(self._sandboxes.find(id).tenant)
        return await self._terminals.join(id, name, rows, cols)
