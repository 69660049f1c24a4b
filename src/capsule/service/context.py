"""One context: an interpreter that lives from run to run, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from capsule.errors import CapacityError, NotFoundError, WrongStateError
from capsule.model import ExecId
from capsule.service.talk import Talk

MAX_WAITING = 32
RESTARTED = "it was restarted"  # why an interpreter is dead, until the next one is there


@dataclass(frozen=True, slots=True)
class ContextRecord:
    """What the store keeps: enough to find the interpreter again, or to start another."""

    id: str
    language: str
    kernel: str
    cwd: str
    env: Mapping[str, str]
    imports: tuple[str, ...]
    created: float  # wall clock
    exec_id: str
    nonce: str
    run: int = 0  # the number of the last request
    busy: bool = False  # a run is under way
    dead: str = ""  # why; "": it lives
    user: str = ""  # as an ExecRequest has it
    greeted: bool = True  # its interpreter is ready, and may hold what runs have made


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """A context as it is now."""

    id: str
    language: str
    state: str  # idle, running, dead
    reason: str  # why it is dead
    cwd: str  # where it started
    created_at: datetime  # UTC
    runs: int
    waiting: int  # runs in line
    lost_run: int | None  # one that was under way when the server was restarted
    exec_id: str


@dataclass(slots=True, eq=False)
class Context:
    record: ContextRecord
    talk: Talk | None = None
    running: bool = False
    lost_run: int | None = None
    syncing: int = 0  # a sync that has not been answered yet
    gone: bool = False  # deleted, or its sandbox was: nothing of it is recorded any more
    over: str = ""  # why its interpreter is being ended by us
    waiting: int = 0
    # One run at a time, in the order of their coming; also held while it is restarted.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def exec_id(self) -> ExecId:
        return ExecId(self.record.exec_id)

    @property
    def state(self) -> str:
        if self.record.dead:
            return "dead"
        return "running" if self.running or self.record.busy else "idle"

    @property
    def under_way(self) -> int:
        """The run that an interrupt means, while it is running."""
        lost = None if self.running else self.lost_run
        return self.record.run if lost is None else lost

    def info(self) -> ContextInfo:
        record = self.record
        return ContextInfo(
            id=record.id,
            language=record.language,
            state=self.state,
            reason=record.dead,
            cwd=record.cwd,
            created_at=datetime.fromtimestamp(record.created, UTC),
            runs=record.run,
            waiting=self.waiting,
            lost_run=self.lost_run,
            exec_id=record.exec_id,
        )

    async def enter(self) -> None:
        """Wait in line for a turn; `turn` is then to be released. Raises CapacityError."""
        if self.waiting >= MAX_WAITING:
            raise CapacityError(
                f"context {self.id} has {self.waiting} runs in line, limit {MAX_WAITING}",
                hint="wait for some to end, or take another context",
                limit=MAX_WAITING,
            )
        self.waiting += 1
        try:
            await self.turn.acquire()
        finally:
            self.waiting -= 1

    def check_alive(self) -> None:
        """Raises NotFoundError, WrongStateError."""
        if self.gone:
            raise NotFoundError(f"context {self.id} was deleted", hint="create another")
        if self.record.dead == RESTARTED:
            raise WrongStateError(
                f"context {self.id} was restarted before it was this run's turn",
                hint="send it again: a fresh interpreter begins, with fresh variables",
                context=self.id,
                state="dead",
            )
        if self.record.dead:
            raise WrongStateError(
                f"context {self.id} is dead: {self.record.dead}",
                hint="restart it, which begins with fresh variables",
                context=self.id,
                state="dead",
            )
