"""Sessions: a sandbox with a name that outlives it, a log of what was run, and what that left.

Tasks, all owned by `Sessions` and ended by `aclose`:
  open ID    one per session that is being opened, so that a caller who leaves leaves nothing half
  sweep      closes sessions that nobody uses, and removes what is too old or too much
and those of `executions`.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import mimetypes
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple, Self

import structlog

from capsule.cloud_settings import e2b_key
from capsule.config import Config
from capsule.errors import (
    CapsuleError,
    ConflictError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    WrongStateError,
)
from capsule.providers.registry import names as provider_names
from capsule.registry_file import Agent, Tool
from capsule.service import Files, Service, validate
from capsule.service.clock import Clock, SystemClock
from capsule.service.lock import DirectoryLock
from capsule.service.tasks import Tasks, outcome
from capsule.sessions.blobs import Blobs
from capsule.sessions.execution import Logged
from capsule.sessions.executions import Executions
from capsule.sessions.harvest import Harvest
from capsule.sessions.ledger import Ledger
from capsule.sessions.life import Life
from capsule.sessions.plan import CLOUD, Wish, make_plan
from capsule.sessions.records import Artifact, Executed, Phase, Session, Task, new_uid
from capsule.sessions.registry import Registry
from capsule.sessions.running import run_code
from capsule.sessions.stored import Stored
from capsule.sessions.sweep import Sweep
from capsule.sessions.tools import check_arguments, run_tool
from capsule.sessions.workspace import Workspaces
from capsule.settings import brief

log = structlog.get_logger(__name__)

MAX_READ = 4 * 1024 * 1024
MAX_LOG = 8 * 1024 * 1024  # bytes of text at a time
SHARE = 4  # one session may have this part of the storage


class Counts(NamedTuple):
    executions: int
    artifacts: int


class Sessions:
    """Every method that names a session raises NotFoundError for another tenant's."""

    def __init__(self, config: Config, service: Service, clock: Clock | None = None) -> None:
        self._config = config
        self._service = service
        self._clock = clock or SystemClock()
        self._folder = config.storage_dir or config.data_dir / "storage"
        self.registry = Registry(config.registry_dir)
        self._ledger = Ledger(self._folder / "sessions.db")
        self._blobs = Blobs(self._folder / "artifacts")
        self._kept = Workspaces(service, self._folder / "workspaces", most=config.max_snapshot)
        self._stored = Stored(self._ledger, self._kept, service)
        self._life = Life(config, service, self._ledger, self._kept, self._clock)
        harvest = Harvest(
            self._blobs,
            self._stored,
            most=config.max_artifact,
            most_together=config.storage_bytes // SHARE,
        )
        self._executions = Executions(config, service, self._ledger, harvest, self._clock)
        self._sweep = Sweep(
            config, self._ledger, self._blobs, self._life, self._executions, self._clock
        )
        self._lock: DirectoryLock | None = None
        self._providers: tuple[str, ...] = ()
        self._tasks = Tasks()

    async def open(self) -> None:
        """After the service: what a killed server left half done is done, or undone.

        Raises InvalidError (the registry), ForbiddenError, UnavailableError, NoSpaceError.
        """
        await self.registry.open()
        lock = await asyncio.to_thread(DirectoryLock.acquire, self._folder)
        await self._ledger.open()
        self._lock = lock
        self._providers = await asyncio.to_thread(provider_names)
        if e2b_key(self._config) is None:
            self._providers = tuple(name for name in self._providers if name != CLOUD)
        await asyncio.to_thread(mimetypes.init)
        await self._blobs.open()
        await self._kept.open()
        self._stored.open()
        await self._executions.open()
        for session in await self._ledger.list(phase=Phase.OPENING):
            await self._life.recover(session)
        deleted = await self._ledger.list(phase=Phase.DELETED)
        await self._kept.sweep([*await self._ledger.list(), *deleted])
        self._tasks.spawn(self._sweep.forever(), "sweep sessions")

    async def aclose(self) -> None:
        """Where sandboxes are deleted with the server, the files of sessions are kept first."""
        await self._tasks.aclose()
        await self._executions.aclose()
        if self._config.drain == "delete" and self._lock is not None:
            left = await self._ledger.list(phase=Phase.OPEN)
            await self._sweep.close(left, "the server stopped")
        await self._ledger.aclose()
        if self._lock is not None:
            self._lock.close()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def create(self, tenant: str, wish: Wish) -> Session:
        """Returns when its sandbox runs. Raises ConflictError (its id is taken), NotFoundError
        (environment, agent), and what `Service.create` raises."""
        plan = await make_plan(
            wish, self.registry, self._service, self._config, self._providers, tenant
        )
        now, uid = self._clock.now(), new_uid()
        session = Session(
            uid=uid,
            id=validate.name("session_id", wish.session_id) if wish.session_id else uid,
            phase=Phase.OPENING,
            environment=plan.environment,
            template=plan.template,
            created=now,
            active=now,
            idle_timeout=plan.idle_timeout,
            tenant=tenant,
            provider=plan.provider or "",
            language=plan.language,
            agent=plan.agent,
            limits=plan.limits,
            env=plan.env,
            metadata=dict(wish.metadata),
        )
        opening = self._tasks.spawn(self._life.start(session), f"open {session.id}")
        return await outcome(opening)

    async def get(self, tenant: str, id: str) -> Session:
        """Also one that is closed or deleted."""
        return await self._settled(await self._ledger.get(tenant, id))

    async def list(
        self, tenant: str, phase: Phase | None = None, *, after: str | None = None, limit: int = -1
    ) -> builtins.list[Session]:
        """Oldest first, those made after `after`; deleted ones only if they are asked for."""
        last = await self._ledger.get(tenant, after) if after is not None else None
        found = await self._ledger.list(tenant=tenant, phase=phase, after=last, limit=limit)
        settled = [await self._settled(session) for session in found]
        return [each for each in settled if phase in (None, each.phase)]

    async def counts(self, *sessions: Session) -> builtins.list[Counts]:
        return [Counts(*each) for each in await self._ledger.counts(sessions)]

    async def close(self, tenant: str, id: str) -> Session:
        """End its sandbox and keep its files."""
        session = await self._ledger.get(tenant, id)
        async with self._life.turn(session):
            session = await self._life.settle(await self._ledger.get(tenant, id))
            if session.phase is Phase.CLOSED:
                return session
            return await self._life.close(_open(session), "it was closed")

    async def reopen(self, tenant: str, id: str) -> Session:
        """A new sandbox with its files; nothing, if it is open."""
        session = await self._ledger.get(tenant, id)
        return await outcome(self._tasks.spawn(self._reopen(tenant, session), f"open {id}"))

    async def _reopen(self, tenant: str, session: Session) -> Session:
        async with self._life.turn(session):
            session = await self._life.settle(await self._ledger.get(tenant, session.id))
            if session.phase is Phase.OPEN:
                return session
            if session.phase is not Phase.CLOSED:
                raise _not_open(session)
            return await self._life.reopen(session)

    async def delete(
        self, tenant: str, id: str, *, sandbox_id: str | None = None, purge: bool = False
    ) -> Session:
        """End its sandbox and remove its files. Its log and its artifacts stay until they are old,
        unless `purge` is given. Raises GoneError, ConflictError (that is not its sandbox)."""
        session = await self._ledger.get(tenant, id)
        async with self._life.turn(session):
            session = await self._ledger.get(tenant, id)
            if session.phase is Phase.DELETED and not purge:
                raise _not_open(session)
            _check_sandbox(session, sandbox_id)
            if session.phase is not Phase.DELETED:
                session = await self._life.delete(session)
            if purge:
                hashes = await self._ledger.forget(session)
                await self._blobs.discard(hashes, self._ledger.recorded)
        return session

    async def execute(
        self,
        tenant: str,
        id: str,
        code: str,
        *,
        language: str | None = None,
        timeout: float | None = None,
        actor: str = "",
    ) -> Executed:
        """Run code as in a notebook. What the code did is in the result, never an error. `actor` is
        who the log says it was."""
        session = await self._usable(tenant, id)
        task = Task("code", code, language=language or session.language or "", actor=actor)
        return await self._executions.run(
            session, task, lambda session: run_code(self._service, session, code, language, timeout)
        )

    async def call_tool(
        self, tenant: str, id: str, name: str, arguments: Any, *, actor: str = ""
    ) -> Executed:
        """Raises NotFoundError (the tool), ForbiddenError (its agent does not have it),
        InvalidError (the arguments)."""
        session = await self._usable(tenant, id)
        tool = await self._tool(session, name)
        # A schema may have much to do with arguments of some megabytes.
        checked = await asyncio.to_thread(check_arguments, tool, arguments)
        task = Task("tool", _as_text(checked), tool=tool.name, actor=actor)
        return await self._executions.run(
            session,
            task,
            lambda session: run_tool(self._service, session, tool, checked, limit=MAX_READ),
        )

    async def tools(self, session: Session) -> builtins.list[Tool]:
        """What may be called in it: its agent's, or all there are."""
        await self.registry.fresh()
        if not session.agent:
            return self.registry.all(Tool)
        return [self.registry.get(Tool, name) for name in self._agent(session).tools]

    def _agent(self, session: Session) -> Agent:
        return self.registry.get(Agent, session.agent)

    async def _tool(self, session: Session, name: str) -> Tool:
        await self.registry.fresh()
        tool = self.registry.get(Tool, name)
        if session.agent and name not in self._agent(session).tools:
            raise ForbiddenError(
                f"agent {session.agent} of session {session.id} does not have the tool {name}",
                hint=f"it has: {', '.join(self._agent(session).tools) or 'none'}",
                field="tool",
            )
        return tool

    async def files(self, tenant: str, id: str) -> Files:
        return self._service.files((await self._usable(tenant, id)).sandbox_id)

    async def log(
        self, tenant: str, id: str, *, after: int = 0, limit: int = 100
    ) -> builtins.list[Logged]:
        session = await self._ledger.get(tenant, id)
        return await self._ledger.log(session, after=after, limit=limit, most=MAX_LOG)

    async def artifacts(self, tenant: str, id: str) -> builtins.list[Artifact]:
        return await self._ledger.artifacts(await self._ledger.get(tenant, id))

    async def open_artifact(
        self, tenant: str, id: str, artifact_id: str
    ) -> tuple[Artifact, BinaryIO]:
        """Raises NotFoundError. The file is the caller's to close."""
        session = await self._ledger.get(tenant, id)
        found = await self._ledger.artifact(session, artifact_id)
        if found is None:
            raise NotFoundError(
                f"session {session.id} has no artifact {brief(artifact_id)}",
                hint="list its artifacts; it may have been too old",
            )
        return found, await self._blobs.open_file(found.sha256)

    async def tidy(self) -> None:
        """Remove what is too old, or too much."""
        await self._sweep.tidy()

    async def _usable(self, tenant: str, id: str) -> Session:
        """One that is open, which lives on from now. Raises GoneError, WrongStateError."""
        session = _open(await self.get(tenant, id))
        await self._ledger.touch(session, self._clock.now())
        await self._service.keep_alive(session.sandbox_id)
        return session

    async def _settled(self, session: Session) -> Session:
        if not self._life.is_over(session):
            return session
        async with self._life.turn(session):
            return await self._life.settle(await self._ledger.get(session.tenant, session.id))


def _open(session: Session) -> Session:
    if session.phase is not Phase.OPEN:
        raise _not_open(session)
    return session


def _not_open(session: Session) -> CapsuleError:
    details = {"session_id": session.id, "state": str(session.phase)}
    if session.phase is Phase.DELETED:
        return GoneError(f"session {session.id} was deleted", **details)
    why = f": {session.reason}" if session.reason else ""
    return WrongStateError(
        f"session {session.id} is {session.phase}{why}",
        hint="reopen it, which gives it a sandbox with its files",
        **details,
    )


def _check_sandbox(session: Session, sandbox_id: str | None) -> None:
    """Whoever names the sandbox means the session that has it."""
    if sandbox_id and sandbox_id not in (session.sandbox_id, *session.sandboxes):
        raise ConflictError(
            f"session {session.id} does not have sandbox {brief(sandbox_id)}",
            hint="leave out sandbox_id, or name its own",
            field="sandbox_id",
        )


def _as_text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, sort_keys=True)
