"""The records of sessions: who they are, what was run in them, and what that left.

sessions    one row each, replaced as it changes; rows of deleted ones stay until they are old
running     executions under way: what a killed server leaves here is told as lost by the next
log         append-only, a hash chain over all sessions (see `chain`)
texts       code and output of log entries, within a cap; may be removed
anchors     where the log begins after entries were removed by age
artifacts   which files were kept, of which session; the content is in `blobs`
"""

from __future__ import annotations

import builtins
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from capsule import chain
from capsule.chain import Entry, Texts, Verdict
from capsule.errors import ConflictError, InternalError
from capsule.service.database import Database, translated, whole
from capsule.sessions.records import Artifact, Outcome, Phase, Session, Task
from capsule.sessions.retention import Item, giving_way

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
T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class Running(NamedTuple):
    """An execution under way."""

    id: int
    session: str  # uid
    sandbox: str
    started: float
    task: Task


class Place(NamedTuple):
    """Of an execution in the log."""

    number: int  # within its session
    seq: int
    hash: str


class Logged(NamedTuple):
    """An execution that is over."""

    seq: int
    number: int
    hash: str
    said: dict[str, Any]
    texts: Texts


class Ledger:
    """Every method may raise UnavailableError and NoSpaceError; then nothing was changed."""

    def __init__(self, path: Path) -> None:
        self._db = Database(path, schema=_SCHEMA, version=1)

    async def open(self) -> None:
        await self._db.open()

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
            _bytes(running.task.command)[:cap], outcome.stdout[:cap], outcome.stderr[:cap]
        )
        said = _said(session, running, outcome, artifacts, texts)

        def write(db: sqlite3.Connection) -> Place:
            number = _next_number(db, session.uid)
            last = _last(db)
            entry = chain.seal(last.seq + 1, last.hash, {**said, "number": number})
            row = (entry.seq, session.tenant, session.uid, number, running.started)
            db.execute(
                "INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, entry.hash, entry.body)
            )
            db.execute("INSERT INTO texts VALUES (?, ?, ?, ?)", (entry.seq, *texts))
            for artifact in artifacts:
                _keep(db, session.tenant, artifact, number)
            db.execute("DELETE FROM running WHERE id = ?", (running.id,))
            return Place(number, entry.seq, entry.hash)

        return await self._db.run(whole(write))

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
            ask = (
                "SELECT (SELECT ifnull(max(number), 0) FROM log WHERE session = :uid),"
                " (SELECT count(*) FROM artifacts WHERE session = :uid)"
            )
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

    async def in_use(self) -> set[str]:
        """The hashes of all contents that an artifact has."""
        rows = await self._db.run(
            lambda db: db.execute("SELECT DISTINCT sha256 FROM artifacts").fetchall()
        )
        return {sha256 for (sha256,) in rows}

    async def forget(self, session: Session) -> None:
        """Its artifacts, and the text of its log. What the log says of them stays."""

        def write(db: sqlite3.Connection) -> None:
            uid = (session.uid,)
            db.execute("DELETE FROM artifacts WHERE session = ?", uid)
            db.execute("DELETE FROM texts WHERE seq IN (SELECT seq FROM log WHERE session=?)", uid)

        await self._db.run(whole(write))

    async def expire(self, before: float) -> None:
        """Remove what is older: artifacts, entries of the log, sessions that were deleted."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM artifacts WHERE created < ?", (before,))
            db.execute("DELETE FROM sessions WHERE phase = 'deleted' AND active < ?", (before,))
            # Only from the beginning: the chain must not get holes.
            first = db.execute("SELECT min(seq) FROM log WHERE started >= ?", (before,)).fetchone()
            upto = first[0] - 1 if first[0] is not None else _last(db).seq
            cut = db.execute("SELECT seq, hash FROM log WHERE seq = ?", (upto,)).fetchone()
            if cut is not None:
                db.execute("DELETE FROM log WHERE seq <= ?", (upto,))
                db.execute("DELETE FROM texts WHERE seq <= ?", (upto,))
                db.execute("DELETE FROM anchors")
                db.execute("INSERT INTO anchors VALUES (?, ?)", cut)

        await self._db.run(whole(write))

    async def shrink(self, most: int) -> None:
        """Remove artifacts until the contents of all have at most so many bytes, and text of the
        log: the oldest of the tenant that has most."""

        def write(db: sqlite3.Connection) -> None:
            for id in _too_many(db, most):
                db.execute("DELETE FROM artifacts WHERE id = ?", (id,))
            while sum((sizes := _text_sizes(db)).values()) > most:
                tenant = max(sizes, key=lambda name: sizes[name])
                db.execute(_OLDEST_TEXTS, (tenant,))

        await self._db.run(whole(write))


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


def _next_number(db: sqlite3.Connection, uid: str) -> int:
    row = db.execute("SELECT ifnull(max(number), 0) FROM log WHERE session = ?", (uid,)).fetchone()
    return int(row[0]) + 1


def _too_many(db: sqlite3.Connection, most: int) -> builtins.list[str]:
    rows = db.execute("SELECT tenant, id, sha256, size FROM artifacts ORDER BY created, rowid")
    return giving_way((Item(*row) for row in rows), most)


_OLDEST_TEXTS = (
    "DELETE FROM texts WHERE seq IN"
    " (SELECT seq FROM texts JOIN log USING (seq) WHERE tenant = ? ORDER BY seq LIMIT 256)"
)


def _text_sizes(db: sqlite3.Connection) -> dict[str, int]:
    """Bytes of text in the log, by tenant."""
    size = "sum(ifnull(length(command), 0) + ifnull(length(stdout), 0) + ifnull(length(stderr), 0))"
    query = f"SELECT tenant, {size} FROM texts JOIN log USING (seq) GROUP BY tenant"
    return dict(db.execute(query).fetchall())


def _save(db: sqlite3.Connection, how: str, session: Session) -> None:
    row = (session.uid, session.tenant, session.id, str(session.phase), session.created)
    db.execute(
        f"{how} INTO sessions VALUES (?1, ?2, ?3, ?4, ?5,"
        " max(?6, ifnull((SELECT active FROM sessions WHERE uid = ?1), 0)), ?7)",
        (*row, session.active, _encode(session)),
    )


def _session(body: bytes, active: float) -> Session:
    return replace(_decode(body, Session), active=active)


def _keep(db: sqlite3.Connection, tenant: str, artifact: Artifact, number: int) -> None:
    artifact = replace(artifact, execution=number)
    row = (artifact.id, tenant, artifact.session, artifact.sha256, artifact.size)
    db.execute(
        "INSERT INTO artifacts VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*row, artifact.created, _encode(artifact)),
    )


def _said(
    session: Session,
    running: Running,
    outcome: Outcome,
    artifacts: tuple[Artifact, ...],
    texts: Texts,
) -> dict[str, Any]:
    """All that the log says of an execution, but its place."""
    task = running.task
    return {
        "tenant": session.tenant,
        "session": session.uid,
        "session_id": session.id,
        "sandbox_id": running.sandbox,
        "kind": task.kind,
        "actor": task.actor,
        "tool": task.tool,
        "language": task.language,
        "started_at": chain.stamp(running.started),
        "duration_ms": round(outcome.duration_ms, 3),
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "error": f"{outcome.error.name}: {outcome.error.value}"[:500] if outcome.error else "",
        "command_bytes": len(_bytes(task.command)),
        "stdout_bytes": len(outcome.stdout),
        "stderr_bytes": len(outcome.stderr),
        "stdout_truncated": outcome.stdout_truncated,
        "stderr_truncated": outcome.stderr_truncated,
        "results": len(outcome.results),
        "artifacts": [
            {"name": each.name, "sha256": each.sha256, "size": each.size} for each in artifacts
        ],
        **{f"{name}_sha256": chain.digest(text or b"") for name, text in texts._asdict().items()},
    }


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _decode(body: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.MsgspecError as error:
        raise InternalError(f"a record of sessions cannot be read: {error}") from error
