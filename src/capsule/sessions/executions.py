"""Running things in sessions: every run is seen to its end and into the log.

Tasks, owned by `Executions` and ended by `aclose`:
  run in ID    one per execution under way; it goes on when its caller leaves

Noted before it begins: what a killed server was running is logged by the next one, as lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

import structlog

from capsule.config import Config
from capsule.errors import CapsuleError, GoneError, UnavailableError
from capsule.service import Files, Service
from capsule.service.clock import Clock
from capsule.service.tasks import Tasks, outcome
from capsule.sessions.execution import Running
from capsule.sessions.harvest import Found, Harvest
from capsule.sessions.ledger import Ledger
from capsule.sessions.records import Artifact, Executed, Outcome, Session, Skipped, Task

log = structlog.get_logger(__name__)

Work = Callable[[Session], Awaitable[Outcome]]
STOPPED = "the server stopped while it ran; what it did is unknown"


class Executions:
    def __init__(
        self, config: Config, service: Service, ledger: Ledger, harvest: Harvest, clock: Clock
    ) -> None:
        self._cap = config.log_output
        self._service = service
        self._ledger = ledger
        self._harvest = harvest
        self._clock = clock
        self._tasks = Tasks()
        self.kept_bytes = 0  # since somebody has looked
        self._busy: Counter[str] = Counter()
        # Two that end at once must not keep one file twice.
        self._gathering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def open(self) -> None:
        for session, running in await self._ledger.left_running():
            told = Outcome("lost", reason=STOPPED)
            await self._note(session, running, told)

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def busy(self, session: Session) -> bool:
        return self._busy[session.uid] > 0

    async def run(self, session: Session, task: Task, work: Work) -> Executed:
        """Raises what `work` raises; UnavailableError and GoneError are logged as lost runs, after
        the others nothing has run."""
        running = await self._ledger.begin(session, task, self._clock.now())
        return await outcome(
            self._tasks.spawn(self._run(session, running, work), f"run in {session.id}")
        )

    async def _run(self, session: Session, running: Running, work: Work) -> Executed:
        self._busy[session.uid] += 1
        try:
            return await self._seen_through(session, running, work)
        finally:
            self._busy[session.uid] -= 1
            self._busy += Counter()  # forgets those that are at 0
            await self._touch(session)

    async def _seen_through(self, session: Session, running: Running, work: Work) -> Executed:
        try:
            did = await work(session)
        except (UnavailableError, GoneError) as error:
            await self._note(session, running, Outcome("lost", reason=error.message))
            raise
        except CapsuleError:
            await self._ledger.drop(running)
            raise
        lock = self._gathering.setdefault(session.uid, asyncio.Lock())
        async with lock:
            found = await self._gather(session, did)
            try:
                number = await self._note(session, running, did, found.artifacts)
            finally:
                self._harvest.release(session, found.artifacts)
        self.kept_bytes += sum(each.size for each in found.artifacts)
        return Executed(number, did, found.artifacts, found.skipped)

    async def _note(
        self,
        session: Session,
        running: Running,
        did: Outcome,
        artifacts: tuple[Artifact, ...] = (),
    ) -> int:
        """Its number. The server's own log has the hash too: it is elsewhere than the chain."""
        place = await self._ledger.append(session, running, did, artifacts, cap=self._cap)
        log.info(
            "execution",
            tenant=session.tenant,
            session=session.id,
            sandbox=running.sandbox,
            number=place.number,
            status=did.status,
            seq=place.seq,
            hash=place.hash,
        )
        return place.number

    async def _gather(self, session: Session, did: Outcome) -> Found:
        known = await self._ledger.artifacts(session)
        try:
            return await self._harvest.gather(
                session, self._files(session), did.results, known, self._clock.now()
            )
        except CapsuleError as error:  # the run itself is to be told all the same
            log.warning("artifacts not kept", session=session.id, reason=error.message)
            return Found((), (Skipped("*", 0, error.message),))

    def _files(self, session: Session) -> Files | None:
        try:
            return self._service.files(session.sandbox_id)
        except CapsuleError:  # it has just ended; what the results carry is kept all the same
            return None

    async def _touch(self, session: Session) -> None:
        try:
            await self._ledger.touch(session, self._clock.now())
        except CapsuleError as error:
            log.warning("use of a session not noted", session=session.id, reason=error.message)
