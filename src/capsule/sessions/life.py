"""How a session's sandbox begins and ends, and how its files get over the time between.

Recorded first, done then: whenever a sandbox may exist for a session, the next server knows of it.
The sandbox is created with a key that only this session has, so that doing it again after a kill
finds the one that there is.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from weakref import WeakValueDictionary

import structlog

from capsule.config import Config
from capsule.errors import CapsuleError, ConflictError, GoneError, NotFoundError, UnavailableError
from capsule.model import State
from capsule.providers.cleanup import finish
from capsule.service import CreateRequest, Sandbox, Service
from capsule.service.caller import Caller
from capsule.service.clock import Clock
from capsule.sessions.harvest import FOLDER
from capsule.sessions.ledger import Ledger
from capsule.sessions.records import Phase, Session
from capsule.sessions.workspace import Workspaces

log = structlog.get_logger(__name__)

CLEANUP = 30.0


class Life:
    def __init__(
        self, config: Config, service: Service, ledger: Ledger, files: Workspaces, clock: Clock
    ) -> None:
        self._config = config
        self._service = service
        self._ledger = ledger
        self._files = files
        self._clock = clock
        # Two must not open, close or delete one session at once.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, session: Session) -> asyncio.Lock:
        lock = self._locks.get(session.uid)
        if lock is None:
            lock = self._locks[session.uid] = asyncio.Lock()
        return lock

    async def start(self, session: Session) -> Session:
        """A new one. Raises ConflictError (its id is taken), and what `Service.create` raises."""
        session = _opening(session)
        async with self.turn(session):
            await self._ledger.add(session)
            return await self._open(session, before=None)

    async def reopen(self, session: Session) -> Session:
        """One that is closed, with the files that were kept. Called in its turn.

        Raises ConflictError when somebody has removed those; the next time it begins without.
        """
        if not self._files.has(session):
            await self._ledger.save(replace(session, kept=None))
            raise ConflictError(
                f"the files of session {session.id} are gone: somebody removed what they were in",
                hint="reopen it again to begin without files",
                session_id=session.id,
            )
        opening = _opening(replace(session, active=self._clock.now()))
        await self._ledger.save(opening)
        return await self._open(opening, before=session)

    async def recover(self, session: Session) -> None:
        """One that a killed server was opening."""
        before = None
        if session.sandboxes or session.kept:  # it was open once
            before = replace(session, phase=Phase.CLOSED, key="")
        try:
            await self._open(session, before=before)
        except CapsuleError as error:
            log.warning("session not opened", session=session.id, reason=error.message)

    async def _open(self, session: Session, *, before: Session | None) -> Session:
        sandbox: Sandbox | None = None
        try:
            sandbox = await self._service.create(self._request(session), Caller(session.tenant))
            await self._files.restore(sandbox.id, session.kept)
            await self._service.files(sandbox.id).mkdir(FOLDER)
            opened = replace(
                session, phase=Phase.OPEN, sandbox_id=sandbox.id, provider=sandbox.provider, key=""
            )
            await self._ledger.save(opened)
        except BaseException:
            await finish(self._undo(session, before, sandbox), "open", budget=CLEANUP)
            raise
        return opened

    def _request(self, session: Session) -> CreateRequest:
        return CreateRequest(
            template=session.template,
            # The session itself counts how long it is unused. This is for when nobody does.
            ttl=self._config.max_ttl,
            idle_timeout=0.0,
            limits=session.limits or None,
            env=session.env,
            metadata={"session": session.id},
            provider=session.provider or None,
            snapshot=self._files.snapshot(session.kept),
            idempotency_key=session.key,
        )

    async def _undo(
        self, session: Session, before: Session | None, sandbox: Sandbox | None
    ) -> None:
        if sandbox is not None:
            await self._end(sandbox.id)
        if before is None:
            await self._ledger.remove(session)
        else:
            await self._ledger.save(before)

    async def close(self, session: Session, reason: str) -> Session:
        """End its sandbox and keep its files. Called in its turn.

        Raises what keeps its files from being kept; then it is open as before.
        """
        kept = await self._files.keep(session, self._clock.now())
        session, old = replace(session, kept=kept), session.kept
        try:
            await self._ledger.save(session)
        except CapsuleError:
            await self._files.drop(session, kept)
            raise
        await self._files.drop(session, old)
        await self._end(session.sandbox_id)
        return await self._closed(session, reason)

    async def delete(self, session: Session) -> Session:
        """End its sandbox and remove its files. Called in its turn.

        Raises what keeps its files from being removed; then it can be deleted again.
        """
        if session.sandbox_id:
            await self._end(session.sandbox_id)
        await self._files.remove(session, session.kept)
        deleted = replace(
            _without_sandbox(session, "it was deleted"),
            phase=Phase.DELETED,
            kept=None,
            env={},
            active=self._clock.now(),
        )
        await self._ledger.save(deleted)
        return deleted

    async def forget_files(self, session: Session, reason: str) -> None:
        """Of one that is closed. Called in its turn."""
        await self._files.drop(session, session.kept)
        await self._ledger.save(replace(session, kept=None, reason=reason))

    def is_over(self, session: Session) -> bool:
        """Whether it counts as open, and its sandbox is not there."""
        return session.phase is Phase.OPEN and self._over(session) is not None

    async def settle(self, session: Session) -> Session:
        """As it is now: somebody may have ended its sandbox. Called in its turn."""
        if session.phase is not Phase.OPEN or (reason := self._over(session)) is None:
            return session
        await self._end(session.sandbox_id)  # of one that failed something may be left
        return await self._closed(session, reason)

    def _over(self, session: Session) -> str | None:
        """Why its sandbox is; None: it is there."""
        try:
            sandbox = self._service.get(session.sandbox_id)
        except GoneError as error:
            return error.message
        except NotFoundError:
            return f"sandbox {session.sandbox_id} was gone when the server started"
        return f"its sandbox failed: {sandbox.reason}" if sandbox.state is State.FAILED else None

    async def _closed(self, session: Session, reason: str) -> Session:
        closed = replace(_without_sandbox(session, reason), phase=Phase.CLOSED)
        await self._ledger.save(closed)
        return closed

    async def _end(self, sandbox_id: str) -> None:
        try:
            await self._service.delete(sandbox_id)
        except (GoneError, NotFoundError):
            pass  # that is what we want
        except UnavailableError as error:  # the reaper goes on with it
            log.warning("sandbox of a session not ended yet", reason=error.message)


def _opening(session: Session) -> Session:
    return replace(session, phase=Phase.OPENING, key=f"session-{secrets.token_hex(16)}", reason="")


def _without_sandbox(session: Session, reason: str) -> Session:
    had = (session.sandbox_id,) if session.sandbox_id else ()
    return replace(
        session, sandbox_id="", sandboxes=(*session.sandboxes, *had)[-32:], reason=reason
    )
