"""The trail of a server: every call that changes something, and what happened to sandboxes.

Entries are a hash chain, as the log of sessions is (see `chain.py`), in a file of their
own. They are queued by whoever has something to say, who never waits, and written by one task, all
that came meanwhile in one transaction. A server that is killed loses what it was about to write;
one that stops writes everything down.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import msgspec
import structlog

from capsule import chain
from capsule.chain import Entry, Texts, Verdict
from capsule.config import Config
from capsule.errors import CapsuleError
from capsule.service.caller import OPERATOR
from capsule.service.clock import Clock, SystemClock
from capsule.service.database import Database, translated, whole
from capsule.service.happenings import Happening, Happenings
from capsule.service.tasks import Tasks

log = structlog.get_logger(__name__)

FILE = "audit.db"
MAX_WAITING = 50_000
A_WRITE = 500  # entries, at most: a transaction holds up the loop
TIDY_EVERY = 600.0
NOBODY = "server"  # what the server does by itself, at the end of a TTL for instance
_SCHEMA = """
CREATE TABLE trail (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, tenant TEXT NOT NULL, sandbox TEXT NOT NULL,
    hash TEXT NOT NULL, body BLOB NOT NULL
);
CREATE INDEX trail_by_sandbox ON trail (sandbox, seq);
CREATE INDEX trail_by_tenant ON trail (tenant, seq);
CREATE TABLE anchors (seq INTEGER PRIMARY KEY, hash TEXT NOT NULL);
PRAGMA user_version = 1;
"""


class Trail:
    def __init__(self, config: Config, happenings: Happenings, clock: Clock | None = None) -> None:
        self._db = Database(config.data_dir / FILE, schema=_SCHEMA, version=1)
        self._kept_for = config.audit_ttl
        self._mode = config.audit
        self._happenings = happenings
        self._clock = clock or SystemClock()
        self._waiting: deque[dict[str, Any]] = deque()
        self._came = asyncio.Event()
        self._last = (0, chain.START)
        self._open = False
        self._tasks = Tasks()

    async def open(self) -> None:
        await self._db.open()
        self._last = await self._db.run(_last)
        self._happenings.listeners.append(self._hear)
        self._open = True
        self._tasks.spawn(self._write(), "audit: write")
        self._tasks.spawn(self._tidy(), "audit: tidy")

    async def aclose(self) -> None:
        self._open = False
        with contextlib.suppress(ValueError):
            self._happenings.listeners.remove(self._hear)
        await self._tasks.aclose()
        try:
            while self._waiting:
                await self._take()
        except CapsuleError as error:
            log.error("trail not written", lost=len(self._waiting), reason=error.message)
        await self._db.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def note(self, what: str, *, tenant: str, sandbox: str = "", **more: object) -> None:
        """Never waits. Who asked, and by which request, is known from the request's context."""
        about = structlog.contextvars.get_contextvars()
        if self._wants(about):
            self._queue(about, what, tenant=tenant, sandbox=sandbox, **more)

    def _wants(self, about: Mapping[str, Any]) -> bool:
        """Where no keys are asked for, there is nobody to tell apart."""
        actor = about.get("key", NOBODY)
        if not self._open or (self._mode == "auto" and actor == OPERATOR.key_id):
            return False
        return self._mode == "yes" or actor != NOBODY or self._last[0] > 0

    def _queue(
        self, about: Mapping[str, Any], what: str, *, tenant: str, sandbox: str, **more: object
    ) -> None:
        if len(self._waiting) >= MAX_WAITING:
            log.error("the trail cannot be written, and loses this", what=what, sandbox=sandbox)
            return
        said: dict[str, Any] = {
            "at": chain.stamp(self._clock.now()),
            "what": what,
            "tenant": tenant,
            "actor": about.get("key", NOBODY),
            "request": about.get("request", ""),
            "sandbox": sandbox,
            **more,
        }
        self._waiting.append(said)
        self._came.set()

    def _hear(self, happening: Happening) -> None:
        about = structlog.contextvars.get_contextvars()
        if not self._wants(about):
            return
        more: dict[str, object] = {"reason": happening.reason} if happening.reason else {}
        if happening.exec is not None:
            ended = happening.exec
            argv = msgspec.json.encode(ended.argv)
            more = {
                "exec": ended.id,
                "program": ended.argv[0][:200] if ended.argv else "",
                "argv_sha256": chain.digest(argv),
                "reason": str(ended.exit.reason),
                "exit_code": ended.exit.exit_code,
                "duration_ms": ended.exit.duration_ms,
            }
        what, tenant, sandbox = happening.kind, happening.tenant, happening.sandbox
        self._queue(about, what, tenant=tenant, sandbox=sandbox, **more)

    async def entries(
        self, *, tenant: str | None, sandbox: str | None, before: int | None, most: int
    ) -> list[dict[str, Any]]:
        """The newest first; of all tenants if none is named."""
        where, values = ["1"], []
        for condition, value in (
            ("tenant = ?", tenant),
            ("sandbox = ?", sandbox),
            ("seq < ?", before),
        ):
            if value is not None:
                where.append(condition)
                values.append(value)
        query = (
            f"SELECT body, hash FROM trail WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?"
        )
        rows = await self._db.run(lambda db: db.execute(query, (*values, most)).fetchall())
        return [{**msgspec.json.decode(body), "hash": hash} for body, hash in rows]

    async def _write(self) -> None:
        while True:
            self._came.clear()
            try:
                while self._waiting:
                    await self._take()
                    await self._db.trim()
            except CapsuleError as error:
                log.warning("trail not written yet", reason=error.message)
                await asyncio.sleep(1)
                continue
            await self._came.wait()

    async def _take(self) -> None:
        new = list(itertools.islice(self._waiting, A_WRITE))
        await self._append(new)
        for _ in new:  # nobody can come between: they are written, and are not again
            self._waiting.popleft()

    async def _append(self, new: Sequence[dict[str, Any]]) -> None:
        (seq, prev), now, rows = self._last, self._clock.now(), []
        for said in new:
            entry = chain.seal(seq + 1, prev, said)
            rows.append((entry.seq, now, said["tenant"], said["sandbox"], entry.hash, entry.body))
            seq, prev = entry.seq, entry.hash
        insert = "INSERT INTO trail VALUES (?, ?, ?, ?, ?, ?)"
        await self._db.run(whole(lambda db: db.executemany(insert, rows)))
        self._last = (seq, prev)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_EVERY)  # a start has enough to do
            try:
                await self._forget(self._clock.now() - self._kept_for)
            except CapsuleError as error:
                log.warning("trail not tidied", reason=error.message)

    async def _forget(self, before: float) -> None:
        """A few at a time: in a day there may be millions, and a transaction holds up the loop."""
        more = True
        while more:
            more = await self._db.run(whole(lambda db: _cut(db, before)))
            await asyncio.sleep(0)  # whoever else has something to do
        await self._db.checkpoint()


def _cut(db: sqlite3.Connection, before: float) -> bool:
    """From the beginning alone: the chain must not get holes. True: there may be more."""
    first = db.execute("SELECT seq, hash, at FROM trail ORDER BY seq LIMIT ?", (A_WRITE,))
    old = list(itertools.takewhile(lambda row: row[2] < before, first.fetchall()))
    if old:
        seq, hash, _ = old[-1]
        db.execute("DELETE FROM trail WHERE seq <= ?", (seq,))
        db.execute("DELETE FROM anchors")
        db.execute("INSERT INTO anchors VALUES (?, ?)", (seq, hash))
    return len(old) == A_WRITE


def verify_file(path: Path, head: str | None = None) -> Verdict:
    """Of a server that runs or does not; nothing is changed. Blocks."""
    with translated(path), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        after, prev = _anchor(db)
        return chain.verify(_entries(db), after=after, prev=prev, head=head)


def _entries(db: sqlite3.Connection) -> Iterator[tuple[Entry, Texts]]:
    for row in db.execute("SELECT seq, CAST(body AS BLOB), hash FROM trail ORDER BY seq"):
        yield Entry(*row), Texts(None, None, None)


def _anchor(db: sqlite3.Connection) -> tuple[int, str]:
    row = db.execute("SELECT seq, hash FROM anchors ORDER BY seq DESC LIMIT 1").fetchone()
    return row or (0, chain.START)


def _last(db: sqlite3.Connection) -> tuple[int, str]:
    row = db.execute("SELECT seq, hash FROM trail ORDER BY seq DESC LIMIT 1").fetchone()
    return row or _anchor(db)
