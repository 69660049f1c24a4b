"""What becomes of sessions by itself: every second those that nobody uses are closed, every hour
what is too old or too much is removed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from capsule.config import Config
from capsule.errors import CapsuleError
from capsule.service.clock import Clock
from capsule.sessions.blobs import Blobs
from capsule.sessions.executions import Executions
from capsule.sessions.ledger import Ledger
from capsule.sessions.life import Life
from capsule.sessions.records import Phase, Session
from capsule.sessions.retention import Item, giving_way

log = structlog.get_logger(__name__)

SWEEP_EVERY = 1.0
TIDY_EVERY = 3600.0
RETRY = 60.0
CLOSES_AT_ONCE = 8


class Sweep:
    """Has no task of its own: `forever` is one of `Sessions`."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        blobs: Blobs,
        life: Life,
        executions: Executions,
        clock: Clock,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._blobs = blobs
        self._life = life
        self._executions = executions
        self._clock = clock
        self._retry: dict[str, float] = {}  # when a session that could not be closed is tried again

    async def forever(self) -> None:
        tidied = 0.0
        while True:
            try:
                await self._close_unused()
                await self._ledger.trim()
                now = self._clock.monotonic()
                much = self._executions.kept_bytes > self._config.storage_bytes // 16
                if now - tidied > TIDY_EVERY or not tidied or much:
                    tidied, self._executions.kept_bytes = now, 0
                    await self.tidy()
            except CapsuleError as error:
                log.warning("sessions not swept", reason=error.message)
            await asyncio.sleep(SWEEP_EVERY)

    async def _close_unused(self) -> None:
        now, turn = self._clock.now(), self._clock.monotonic()
        due = [
            session
            for session in await self._ledger.unused(now)
            if self._retry.get(session.uid, 0.0) <= turn
        ]
        await self.close(due, "it was not used", if_unused=True)

    async def close(
        self, sessions: Sequence[Session], reason: str, *, if_unused: bool = False
    ) -> None:
        some = asyncio.Semaphore(CLOSES_AT_ONCE)

        async def one(session: Session) -> None:
            async with some:
                await self._try_close(session, reason, if_unused)

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(one(session))

    def _unused(self, session: Session) -> bool:
        left = session.active + session.idle_timeout - self._clock.now()
        return left < 0 and not self._executions.busy(session)

    async def _try_close(self, session: Session, reason: str, if_unused: bool) -> None:
        try:
            async with self._life.turn(session):
                found = await self._ledger.get(session.tenant, session.id)
                session = await self._life.settle(found)
                if session.phase is Phase.OPEN and (self._unused(session) or not if_unused):
                    await self._life.close(session, reason)
            self._retry.pop(session.uid, None)
        except CapsuleError as error:
            self._retry[session.uid] = self._clock.monotonic() + RETRY
            log.warning("session not closed", session=session.id, reason=error.message)

    async def tidy(self) -> None:
        """Remove what is too old, or too much."""
        if age := self._config.storage_age:
            before = self._clock.now() - age
            for session in await self._ledger.list(phase=Phase.CLOSED, before=before):
                async with self._life.turn(session):
                    session = await self._ledger.get(session.tenant, session.id)
                    if session.phase is Phase.CLOSED and session.active < before:
                        await self._life.delete(session)
            await self._ledger.expire(before)
        await self._ledger.shrink(self._config.storage_bytes)
        await self._blobs.sweep(self._ledger.recorded)
        await self._shrink_files()

    async def _shrink_files(self) -> None:
        """Of closed sessions: those that were not used for longest give way."""
        closed = await self._ledger.list(phase=Phase.CLOSED)
        kept = [
            Item(each.tenant, each.uid, each.uid, each.kept.size)
            for each in sorted(closed, key=lambda each: each.active)
            if each.kept
        ]
        going = set(giving_way(kept, self._config.storage_bytes))
        for session in [each for each in closed if each.uid in going]:
            async with self._life.turn(session):
                session = await self._ledger.get(session.tenant, session.id)
                if session.phase is Phase.CLOSED:
                    await self._life.forget_files(session, "its files gave way to newer ones")
