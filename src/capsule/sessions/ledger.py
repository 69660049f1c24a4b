"""The records of sessions: who they are, what was run in them, and what that left.

sessions    one row each, replaced as it changes; rows of deleted ones stay until they are old
running     executions under way: what a killed server leaves here is told as lost by the next
log         append-only, a hash chain over all sessions (see `chain`)
texts       code and output of log entries, within a cap; may be removed
anchors     where the log begins after entries were removed by age
numbers     of a session's entries that were removed: the last, as none is given twice
artifacts   which files were kept, of which session; the content is in `blobs`
"""

from __future__ import annotations

import asyncio
import builtins
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from capsule import chain
from capsule.chain import Entry, Texts, Verdict
from capsule.errors import ConflictError, InternalError, NotFoundError
from capsule.service.database import Database, translated, whole
from capsule.sessions.execution import Logged, Place, Running, as_bytes, said_of
from capsule.sessions.records import Artifact, Outcome, Phase, Session, Task
from capsule.sessions.retention import giving_way
from capsule.sessions.tidying import (
    Step,
    artifact_items,
    artifact_sizes,
    cut_log,
    has_content,
    old_artifacts,
    old_sessions,
    old_texts,
    remove_artifacts,
    some_artifacts,
    text_sizes,
)
from capsule.settings import brief

_SCHEMA = """
CREATE TABLE sessions (
    uid TEXT PRIMARY KEY, tenant TEXT NOT NULL DEFAULT 'default', id TEXT NOT NULL,
    phase TEXT NOT NULL, created REAL NOT NULL, active REAL NOT NULL, body BLOB NOT NULL
);
CREATE UNIQUE INDEX sessions_by_id ON sessions (tenant, id) WHERE phase <> 'deleted';
CREATE INDEX sessions_by_phase ON sessions (phase, active);
CREATE TABLE running (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL, sandbox TEXT NOT NULL, started REAL NOT NULL,
    task BLOB NOT NULL
);
CREATE TABLE log (
    seq INTEGER PRIMARY KEY, tenant TEXT NOT NULL DEFAULT 'default', session TEXT NOT NULL,
    number INTEGER NOT NULL, started REAL NOT NULL, hash TEXT NOT NULL, body BLOB NOT NULL
);
CREATE UNIQUE INDEX log_by_session ON log (session, number);
CREATE TABLE texts (seq INTEGER PRIMARY KEY, command BLOB, stdout BLOB, stderr BLOB);
CREATE TABLE anchors (seq INTEGER PRIMARY KEY, hash TEXT NOT NULL);
CREATE TABLE artifacts (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL DEFAULT 'default', session TEXT NOT NULL,
    sha256 TEXT NOT NULL, size INTEGER NOT NULL, created REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX artifacts_by_session ON artifacts (session, created);
CREATE INDEX artifacts_by_content ON artifacts (sha256);
CREATE INDEX artifacts_by_age ON artifacts (created);
PRAGMA user_version = 1;
"""
_LATER = """
CREATE TABLE IF NOT EXISTS numbers (session TEXT PRIMARY KEY, last INTEGER NOT NULL);
"""
T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class Ledger:
    """Every method may raise UnavailableError and NoSpaceError; then nothing was changed."""

    def __init__(self, path: Path) -> None:
        self._db = Database(path, schema=_SCHEMA, version=1, later=_LATER)
        # Bytes of artifacts, by tenant; what is the same counts once for each of them.
        self.stored: Counter[str] = Counter()

    async def open(self) -> None:
        await self._db.open()
        self.stored = Counter(await self._db.aside(artifact_sizes))

    async def aclose(self) -> None:
        await self._db.aclose()

    async def trim(self) -> None:
        """Keep its file small while much is written; mostly does nothing."""
        await self._db.trim()

    async def add(self, session: Session) -> None:
        """Raises ConflictError: its id is taken."""
        try:
            await self._db.run(lambda db: _save(db, "INSERT", session))
        except ConflictError:
            raise ConflictError(
                f"session {session.id} exists already",
                hint="take another session_id, or delete that one",
                field="session_id",
            ) from None

    async def save(self, session: Session) -> None:
        await self._db.run(lambda db: _save(db, "INSERT OR REPLACE", session))

    async def remove(self, session: Session) -> None:
        """One that has never been open, or that nobody asks for any more."""
        uid = session.uid
        await self._db.run(lambda db: db.execute("DELETE FROM sessions WHERE uid = ?", (uid,)))

    async def touch(self, session: Session, now: float) -> None:
        """It is used. Its record is left alone: somebody may be changing it."""
        row = (now, session.uid)
        await self._db.run(
            lambda db: db.execute("UPDATE sessions SET active = ? WHERE uid = ?", row)
        )

    async def find(self, tenant: str, id: str) -> Session | None:
        """The one with this id; else the last with it that was deleted."""
        return await self._one(
            "SELECT body, active FROM sessions WHERE tenant = ? AND id = ?"
            " ORDER BY phase = 'deleted', created DESC LIMIT 1",
            (tenant, id),
        )

    async def get(self, tenant: str, id: str) -> Session:
        """As `find`. Raises NotFoundError."""
        session = await self.find(tenant, id)
        if session is None:
            raise NotFoundError(
                f"session {brief(id)} does not exist",
                hint="list the sessions to see what there is",
                session_id=str(id)[:80],
            )
        return session

    async def unused(self, now: float) -> builtins.list[Session]:
        """Those that are open, and have not been used for as long as they may be."""
        rows = await self._db.run(
            lambda db: db.execute(
                "SELECT body, active FROM sessions WHERE phase = 'open'"
                " AND active + json_extract(CAST(body AS TEXT), '$.idle_timeout') < ?",
                (now,),
            ).fetchall()
        )
        return [_session(*row) for row in rows]

    async def list(
        self,
        *,
        tenant: str | None = None,
        phase: Phase | None = None,
        before: float | None = None,
        after: Session | None = None,
        limit: int = -1,
    ) -> builtins.list[Session]:
        """Oldest first; all but the deleted, unless it is those that are asked for. `before`: not
        used since then. `after`: made after that one."""
        rows = await self._db.run(
            lambda db: db.execute(
                "SELECT body, active FROM sessions WHERE (:tenant IS NULL OR tenant = :tenant)"
                " AND (phase = :phase OR :phase IS NULL AND phase <> 'deleted')"
                " AND (:before IS NULL OR active < :before)"
                " AND (:uid IS NULL OR (created, uid) > (:created, :uid))"
                " ORDER BY created, uid LIMIT :limit",
                {
                    "tenant": tenant,
                    "phase": phase and str(phase),
                    "before": before,
                    "created": after and after.created,
                    "uid": after and after.uid,
                    "limit": limit,
                },
            ).fetchall()
        )
        return [_session(*row) for row in rows]

    async def _one(self, query: str, values: tuple[Any, ...]) -> Session | None:
        row = await self._db.run(lambda db: db.execute(query, values).fetchone())
        return None if row is None else _session(*row)

    async def begin(self, session: Session, task: Task, now: float) -> Running:
        row = (session.uid, session.sandbox_id, now, _encode(task))
        id = await self._db.run(
            lambda db: (
                db.execute(
                    "INSERT INTO running (session, sandbox, started, task) VALUES (?, ?, ?, ?)", row
                ).lastrowid
            )
        )
        return Running(id or 0, session.uid, session.sandbox_id, now, task)

    async def drop(self, running: Running) -> None:
        """It did not begin after all."""
        await self._db.run(lambda db: db.execute("DELETE FROM running WHERE id = ?", (running.id,)))

    async def left_running(self) -> builtins.list[tuple[Session, Running]]:
        """What a server that was killed has left."""
        rows = await self._db.run(
            lambda db: db.execute(
                "SELECT s.body, s.active, r.id, r.session, r.sandbox, r.started, r.task"
                " FROM running r JOIN sessions s ON s.uid = r.session ORDER BY r.id"
            ).fetchall()
        )
        return [
            (_session(body, active), Running(id, uid, sandbox, started, _decode(task, Task)))
            for body, active, id, uid, sandbox, started, task in rows
        ]

    async def append(
        self,
        session: Session,
        running: Running,
        outcome: Outcome,
        artifacts: tuple[Artifact, ...] = (),
        *,
        cap: int,
    ) -> Place:
        """Log an execution, with what it left. `cap` bytes of code and of each stream are kept."""
        texts = Texts(
            as_bytes(running.task.command)[:cap], outcome.stdout[:cap], outcome.stderr[:cap]
        )
        said = said_of(session, running, outcome, artifacts, texts)

        def write(db: sqlite3.Connection) -> tuple[Place, int]:
            number = _next_number(db, session.uid)
            last = _last(db)
            entry = chain.seal(last.seq + 1, last.hash, {**said, "number": number})
            row = (entry.seq, session.tenant, session.uid, number, running.started)
            db.execute(
                "INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, entry.hash, entry.body)
            )
            db.execute("INSERT INTO texts VALUES (?, ?, ?, ?)", (entry.seq, *texts))
            added = sum(_keep(db, session.tenant, artifact, number) for artifact in artifacts)
            db.execute("DELETE FROM running WHERE id = ?", (running.id,))
            return Place(number, entry.seq, entry.hash), added

        place, added = await self._db.run(whole(write))
        self.stored[session.tenant] += added
        return place

    async def log(
        self, session: Session, *, after: int, limit: int, most: int
    ) -> builtins.list[Logged]:
        """Oldest first. No more than about `most` bytes of text, but one entry at least."""

        def read(db: sqlite3.Connection) -> builtins.list[Logged]:
            rows = db.execute(
                "SELECT l.seq, l.number, l.hash, l.body, t.command, t.stdout, t.stderr FROM log l"
                " LEFT JOIN texts t ON t.seq = l.seq WHERE l.session = ? AND l.number > ?"
                " ORDER BY l.number LIMIT ?",
                (session.uid, after, limit),
            )
            found: builtins.list[Logged] = []
            size = 0
            for seq, number, hash, body, *texts in rows:
                size += len(body) + sum(len(text) for text in texts if text is not None)
                if found and size > most:
                    break
                said = _decode(body, dict[str, Any])
                found.append(Logged(seq, number, hash, said, Texts(*texts)))
            return found

        return await self._db.run(read)

    async def counts(self, sessions: Sequence[Session]) -> builtins.list[tuple[int, int]]:
        """How many executions and artifacts each of them has."""

        def read(db: sqlite3.Connection) -> builtins.list[tuple[int, int]]:
            ask = f"SELECT {_LAST_NUMBER}, (SELECT count(*) FROM artifacts WHERE session = :uid)"
            return [db.execute(ask, {"uid": each.uid}).fetchone() for each in sessions]

        return await self._db.run(read)

    async def artifacts(self, session: Session) -> builtins.list[Artifact]:
        """Oldest first."""
        rows = await self._db.run(
            lambda db: db.execute(
                "SELECT body FROM artifacts WHERE session = ? ORDER BY created, rowid",
                (session.uid,),
            ).fetchall()
        )
        return [_decode(body, Artifact) for (body,) in rows]

    async def artifact(self, session: Session, id: str) -> Artifact | None:
        row = await self._db.run(
            lambda db: db.execute(
                "SELECT body FROM artifacts WHERE session = ? AND id = ?", (session.uid, id)
            ).fetchone()
        )
        return None if row is None else _decode(row[0], Artifact)

    async def recorded(self, hashes: Sequence[str]) -> set[str]:
        """Those of them that are the content of an artifact."""
        rows = await self._db.run(
            lambda db: db.execute(
                "SELECT DISTINCT sha256 FROM artifacts"
                " WHERE sha256 IN (SELECT value FROM json_each(?))",
                (json.dumps(hashes),),
            ).fetchall()
        )
        return {sha256 for (sha256,) in rows}

    async def forget(self, session: Session) -> builtins.list[str]:
        """Its artifacts, and the text of its log. What the log says of them stays. The hashes of
        the contents that it had."""

        def write(db: sqlite3.Connection) -> tuple[Counter[str], builtins.list[str]]:
            query = "SELECT id, sha256 FROM artifacts WHERE session = ?"
            rows = db.execute(query, (session.uid,)).fetchall()
            own = "SELECT seq FROM log WHERE session = ?"
            db.execute(f"DELETE FROM texts WHERE seq IN ({own})", (session.uid,))
            return remove_artifacts(db, [id for id, _ in rows]), [sha256 for _, sha256 in rows]

        freed, hashes = await self._db.run(whole(write))
        self.stored -= freed
        return hashes

    async def expire(self, before: float) -> None:
        """Remove what is older: artifacts, entries of the log, sessions that were deleted."""
        await self._in_steps(lambda db: old_artifacts(db, before))
        await self._in_steps(lambda db: cut_log(db, before))
        await self._in_steps(lambda db: old_sessions(db, before))

    async def shrink(self, most: int) -> None:
        """Remove artifacts until the contents of all have at most so many bytes, and text of the
        log: the oldest of the tenant that has most."""
        going = await self._db.aside(lambda db: giving_way(artifact_items(db), most))
        await self._in_steps(lambda db: some_artifacts(db, going))
        sizes = Counter(await self._db.aside(text_sizes))
        while sizes.total() > most:
            tenant = sizes.most_common(1)[0][0]
            freed = await self._db.run(whole(partial(old_texts, tenant=tenant)))
            sizes[tenant] = sizes[tenant] - freed if freed else 0
            await asyncio.sleep(0)  # whoever else has something to do

    async def _in_steps(self, step: Callable[[sqlite3.Connection], Step]) -> None:
        """A few at a time: there may be many, and a transaction holds up the loop."""
        more = True
        while more:
            more, freed = await self._db.run(whole(step))
            self.stored -= freed
            await asyncio.sleep(0)  # whoever else has something to do


def verify_file(path: Path, head: str | None = None) -> Verdict:
    """Of the records of a server, be it running or not; nothing is changed. Blocks."""
    with translated(path), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        seq, hash = _anchor(db)
        return chain.verify(_entries(db), after=seq, prev=hash, head=head)


def _entries(db: sqlite3.Connection) -> Iterator[tuple[Entry, Texts]]:
    rows = db.execute(
        "SELECT l.seq, CAST(l.body AS BLOB), l.hash, CAST(t.command AS BLOB),"
        " CAST(t.stdout AS BLOB), CAST(t.stderr AS BLOB) FROM log l"
        " LEFT JOIN texts t ON t.seq = l.seq ORDER BY l.seq"
    )
    for row in rows:
        yield Entry(*row[:3]), Texts(*row[3:])


class _Last(NamedTuple):
    seq: int
    hash: str


def _last(db: sqlite3.Connection) -> _Last:
    row = db.execute("SELECT seq, hash FROM log ORDER BY seq DESC LIMIT 1").fetchone()
    return _Last(*row) if row else _anchor(db)


def _anchor(db: sqlite3.Connection) -> _Last:
    row = db.execute("SELECT seq, hash FROM anchors ORDER BY seq DESC LIMIT 1").fetchone()
    return _Last(*row) if row else _Last(0, chain.START)


# Entries of a session may be removed by age, and it lives on.
_LAST_NUMBER = (
    "max((SELECT ifnull(max(number), 0) FROM log WHERE session = :uid),"
    " ifnull((SELECT last FROM numbers WHERE session = :uid), 0))"
)


def _next_number(db: sqlite3.Connection, uid: str) -> int:
    return int(db.execute(f"SELECT {_LAST_NUMBER}", {"uid": uid}).fetchone()[0]) + 1


def _save(db: sqlite3.Connection, how: str, session: Session) -> None:
    row = (session.uid, session.tenant, session.id, str(session.phase), session.created)
    db.execute(
        f"{how} INTO sessions VALUES (?1, ?2, ?3, ?4, ?5,"
        " max(?6, ifnull((SELECT active FROM sessions WHERE uid = ?1), 0)), ?7)",
        (*row, session.active, _encode(session)),
    )


def _session(body: bytes, active: float) -> Session:
    return replace(_decode(body, Session), active=active)


def _keep(db: sqlite3.Connection, tenant: str, artifact: Artifact, number: int) -> int:
    """How many bytes more its tenant has."""
    artifact = replace(artifact, execution=number)
    added = 0 if has_content(db, tenant, artifact.sha256) else artifact.size
    row = (artifact.id, tenant, artifact.session, artifact.sha256, artifact.size)
    db.execute(
        "INSERT INTO artifacts VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*row, artifact.created, _encode(artifact)),
    )
    return added


def _decode(body: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.MsgspecError as error:
        raise InternalError(f"a record of sessions cannot be read: {error}") from error
