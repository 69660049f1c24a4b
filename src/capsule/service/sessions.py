"""The sessions of a sandbox, kept so that they survive the server."""

from __future__ import annotations

import structlog

from capsule.errors import NoSpaceError, TooLargeError, UnavailableError
from capsule.model import ExecRequest
from capsule.service import carry, validate
from capsule.service.carry import Session
from capsule.service.entry import Entry
from capsule.service.store import Store

log = structlog.get_logger(__name__)

MAX_SESSIONS = 64
MAX_LEARNED = 1000


class Sessions:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def get(self, entry: Entry, name: str) -> Session:
        """Raises InvalidError, TooLargeError (too many of them)."""
        validate.name("session", name)
        if entry.sessions is None:
            found = await self._store.sessions(entry.id)
            if entry.sessions is None:  # nobody else was faster, and has learned something since
                entry.sessions = found
        if name not in entry.sessions and len(entry.sessions) >= MAX_SESSIONS:
            raise TooLargeError(
                f"sandbox {entry.id} has {MAX_SESSIONS} sessions, limit {MAX_SESSIONS}",
                hint="take one of them, or another sandbox",
                field="session",
                limit=MAX_SESSIONS,
            )
        return entry.sessions.get(name, Session())

    async def learn(self, entry: Entry, name: str, request: ExecRequest, message: bytes) -> None:
        """Take over what a program reported, once: a retry of it must not undo what came later.

        Never fails: the exec it belongs to has succeeded.
        """
        after = carry.parse(message)
        if after is None or entry.sessions is None or request.id in entry.learned:
            return
        if len(entry.learned) >= MAX_LEARNED:
            entry.learned.clear()
        entry.learned.add(request.id)
        before = entry.sessions.get(name, Session())
        session = carry.update(before, request.env, after)
        if session != before:
            await self._keep(entry, name, session)

    async def forget_cwd(self, entry: Entry, name: str) -> None:
        """Its directory was removed. The next call starts where a new session would."""
        session = await self.get(entry, name)
        await self._keep(entry, name, Session(session.env, session.unset))

    async def _keep(self, entry: Entry, name: str, session: Session) -> None:
        assert entry.sessions is not None
        entry.sessions[name] = session
        try:
            await self._store.save_session(entry.id, name, session)
        except (UnavailableError, NoSpaceError) as error:
            log.warning("session not recorded", sandbox=entry.id, reason=error.message)
