"""The records that survive the server.

In memory is what is true while the server runs; the store is read at the start and written at
each change. SQLite in WAL mode writes a row in tens of microseconds and without an fsync: what
the kernel has taken survives a `kill -9`, and a power cut ends the boxes as well. Checkpoints,
which do fsync, run in a thread.

Nothing here waits on SQLite's locks, as that would stop the loop: a busy database is tried again
from the loop for `PATIENCE` seconds, then it is UnavailableError. A full disk is NoSpaceError.
Both pass by themselves.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from capsule.errors import ConflictError, InternalError, NoSpaceError, UnavailableError
from capsule.model import SandboxId
from capsule.service.carry import Session
from capsule.service.context import ContextRecord
from capsule.service.entry import Record

PATIENCE = 2.0
KEEP_CLAIMS = 24 * 3600.0
MAX_CLAIMS = 10_000  # per sandbox; the oldest are forgotten first
TRIM_AFTER = 256  # changes, about 4 MiB of log
CHECKPOINTS = (*["PASSIVE"] * 4, "TRUNCATE")

CREATE = "create"  # the scope of keys given to create; those of an exec have the sandbox's id

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Claim:
    """An idempotency key and what it was used for."""

    scope: str
    key: str
    fingerprint: str
    target: str  # the id of the sandbox, or of the exec
    at: float  # wall clock


class Store(Protocol):
    """Every method may raise UnavailableError and NoSpaceError; then nothing was changed."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def load(self) -> list[Record]:
        """Every record, oldest first."""

    async def save(self, record: Record, claim: Claim | None = None) -> None:
        """Insert or replace; the claim with it or not at all. Raises ConflictError (the claim)."""

    async def remove(self, id: SandboxId) -> None:
        """The record, its sessions, its contexts and the claims on its execs. The claim that made
        it stays."""

    async def find(self, scope: str, key: str) -> Claim | None: ...

    async def claim(self, claim: Claim) -> Claim:
        """Make the claim unless the key is taken. Returns the one that holds."""

    async def release(self, scope: str, key: str) -> None: ...

    async def sessions(self, id: SandboxId) -> dict[str, Session]: ...

    async def save_session(self, id: SandboxId, name: str, session: Session) -> None: ...

    async def forget_sessions(self, id: SandboxId) -> None:
        """And contexts: all that a box holds the other half of."""

    async def contexts(self, id: SandboxId) -> list[ContextRecord]:
        """Oldest first."""

    async def save_context(self, id: SandboxId, record: ContextRecord) -> None: ...

    async def remove_context(self, id: SandboxId, name: str) -> None: ...

    async def load_kept(self, kind: str, type: type[T]) -> list[T]:
        """What is kept beside sandboxes (snapshots, volumes), oldest first."""

    async def save_kept(self, kind: str, name: str, created: float, body: object) -> None: ...

    async def remove_kept(self, kind: str, name: str) -> None: ...

    async def maintain(self, now: float) -> None:
        """Housekeeping: forget old claims, keep files small. Called once a minute or so."""

    async def trim(self) -> None:
        """Keep files small while much is written. Called every second, and mostly does nothing."""


_SCHEMA = """
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY, created REAL NOT NULL, state TEXT NOT NULL, body BLOB NOT NULL
);
CREATE TABLE claims (
    scope TEXT NOT NULL, key TEXT NOT NULL, fingerprint TEXT NOT NULL, target TEXT NOT NULL,
    at REAL NOT NULL, PRIMARY KEY (scope, key)
) WITHOUT ROWID;
CREATE INDEX claims_by_age ON claims (scope, at);
CREATE TABLE sessions (
    sandbox TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (sandbox, name)
) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
_VERSION = 1
# Came later, and an older server does not mind them.
_LATER = """
CREATE TABLE IF NOT EXISTS kept (
    kind TEXT NOT NULL, name TEXT NOT NULL, created REAL NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contexts (
    sandbox TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (sandbox, name)
) WITHOUT ROWID;
"""


class SqliteStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode
        self._used = 0  # since the last checkpoint

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        with _translated(self._path):
            self._path.touch(mode=0o600)
            self._db = self._connect()
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript("BEGIN IMMEDIATE;" + _SCHEMA + "COMMIT;")
            if version in (0, _VERSION):
                self._db.executescript(_LATER)
        if version not in (0, _VERSION):
            raise ConflictError(
                f"{self._path} has format {version}, this version of Capsule knows {_VERSION}",
                hint="use that version, or another data_dir",
            )

    def _connect(self) -> sqlite3.Connection:
        # Used by one thread at a time: opened in one, used in the loop's, closed there.
        db = sqlite3.connect(self._path, timeout=0.0, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("PRAGMA journal_size_limit = 0")  # a log that is begun again is cut off first
        return db

    async def aclose(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            await asyncio.to_thread(db.close)

    async def load(self) -> list[Record]:
        decode = msgspec.json.Decoder(Record).decode
        rows = await self._try(
            lambda db: db.execute("SELECT body FROM sandboxes ORDER BY created, rowid").fetchall()
        )
        try:
            return [decode(body) for (body,) in rows]
        except msgspec.MsgspecError as error:
            raise InternalError(
                f"{self._path} holds a record that cannot be read: {error}"
            ) from error

    async def save(self, record: Record, claim: Claim | None = None) -> None:
        row = (record.id, record.created, str(record.state), self._encode(record))

        def write(db: sqlite3.Connection) -> None:
            if claim is not None:
                db.execute("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", _claim_row(claim))
            db.execute("INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?, ?)", row)

        await self._try(write if claim is None else _whole(write))

    async def remove(self, id: SandboxId) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sandboxes WHERE id = ?", (id,))
            db.execute("DELETE FROM sessions WHERE sandbox = ?", (id,))
            db.execute("DELETE FROM contexts WHERE sandbox = ?", (id,))
            db.execute("DELETE FROM claims WHERE scope = ?", (id,))

        await self._try(_whole(write))

    async def find(self, scope: str, key: str) -> Claim | None:
        return await self._try(lambda db: _find(db, scope, key))

    async def claim(self, claim: Claim) -> Claim:
        def write(db: sqlite3.Connection) -> Claim:
            held = _find(db, claim.scope, claim.key)
            if held is None:
                db.execute("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", _claim_row(claim))
            return held or claim

        return await self._try(_whole(write))

    async def release(self, scope: str, key: str) -> None:
        await self._try(
            lambda db: db.execute("DELETE FROM claims WHERE scope = ? AND key = ?", (scope, key))
        )

    async def sessions(self, id: SandboxId) -> dict[str, Session]:
        rows = await self._try(
            lambda db: db.execute(
                "SELECT name, body FROM sessions WHERE sandbox = ?", (id,)
            ).fetchall()
        )
        return {name: msgspec.json.decode(body, type=Session) for name, body in rows}

    async def save_session(self, id: SandboxId, name: str, session: Session) -> None:
        row = (id, name, self._encode(session))
        await self._try(
            lambda db: db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", row)
        )

    async def forget_sessions(self, id: SandboxId) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sessions WHERE sandbox = ?", (id,))
            db.execute("DELETE FROM contexts WHERE sandbox = ?", (id,))

        await self._try(_whole(write))

    async def contexts(self, id: SandboxId) -> list[ContextRecord]:
        rows = await self._try(
            lambda db: db.execute("SELECT body FROM contexts WHERE sandbox = ?", (id,)).fetchall()
        )
        found = [msgspec.json.decode(body, type=ContextRecord) for (body,) in rows]
        return sorted(found, key=lambda record: record.created)

    async def save_context(self, id: SandboxId, record: ContextRecord) -> None:
        row = (id, record.id, self._encode(record))
        await self._try(
            lambda db: db.execute("INSERT OR REPLACE INTO contexts VALUES (?, ?, ?)", row)
        )

    async def remove_context(self, id: SandboxId, name: str) -> None:
        await self._try(
            lambda db: db.execute("DELETE FROM contexts WHERE sandbox = ? AND name = ?", (id, name))
        )

    async def load_kept(self, kind: str, type: type[T]) -> list[T]:
        rows = await self._try(
            lambda db: db.execute(
                "SELECT body FROM kept WHERE kind = ? ORDER BY created", (kind,)
            ).fetchall()
        )
        try:
            return [msgspec.json.decode(body, type=type) for (body,) in rows]
        except msgspec.MsgspecError as error:
            raise InternalError(
                f"{self._path} holds a {kind} that cannot be read: {error}"
            ) from error

    async def save_kept(self, kind: str, name: str, created: float, body: object) -> None:
        row = (kind, name, created, self._encode(body))
        await self._try(
            lambda db: db.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)", row)
        )

    async def remove_kept(self, kind: str, name: str) -> None:
        await self._try(
            lambda db: db.execute("DELETE FROM kept WHERE kind = ? AND name = ?", (kind, name))
        )

    async def maintain(self, now: float) -> None:
        await self._try(lambda db: _forget_claims(db, now))
        await asyncio.to_thread(self._checkpoint)

    async def trim(self) -> None:
        if self._used >= TRIM_AFTER:
            await asyncio.to_thread(self._checkpoint)

    def _checkpoint(self) -> None:
        # Its own connection: PASSIVE never waits for the loop's, nor keeps it waiting. The log
        # begins anew only when all of it was taken in, so it is tried until nothing came in
        # between; where that does not end, writers have to wait for once.
        self._used = 0
        before = -1
        with _translated(self._path):
            db = self._connect()
            db.execute("PRAGMA busy_timeout = 200")  # for TRUNCATE, between two writes
            try:
                for mode in CHECKPOINTS:
                    _, written, _ = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
                    if written == before:
                        break
                    before = written
            finally:
                db.close()

    async def _try(self, work: Callable[[sqlite3.Connection], T]) -> T:
        give_up = time.monotonic() + PATIENCE
        self._used += 1
        while True:
            if self._db is None:
                raise UnavailableError("the store is closed")
            try:
                with _translated(self._path):
                    return work(self._db)
            except UnavailableError as error:
                if not error.details.get("busy") or time.monotonic() > give_up:
                    raise
            await asyncio.sleep(0.02)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in a record")


def _whole(write: Callable[[sqlite3.Connection], T]) -> Callable[[sqlite3.Connection], T]:
    def transaction(db: sqlite3.Connection) -> T:
        db.execute("BEGIN IMMEDIATE")
        try:
            result = write(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk has rolled back already
                db.execute("ROLLBACK")
            raise
        return result

    return transaction


def _find(db: sqlite3.Connection, scope: str, key: str) -> Claim | None:
    row = db.execute(
        "SELECT scope, key, fingerprint, target, at FROM claims WHERE scope = ? AND key = ?",
        (scope, key),
    ).fetchone()
    return None if row is None else Claim(*row)


def _claim_row(claim: Claim) -> tuple[str, str, str, str, float]:
    return (claim.scope, claim.key, claim.fingerprint, claim.target, claim.at)


def _forget_claims(db: sqlite3.Connection, now: float) -> None:
    db.execute(
        "DELETE FROM claims WHERE scope = ? AND at < ?"
        " AND target NOT IN (SELECT id FROM sandboxes)",
        (CREATE, now - KEEP_CLAIMS),
    )
    crowded = db.execute(
        "SELECT scope, count(*) FROM claims WHERE scope <> ? GROUP BY scope HAVING count(*) > ?",
        (CREATE, MAX_CLAIMS),
    ).fetchall()
    for scope, count in crowded:
        db.execute(
            "DELETE FROM claims WHERE scope = ? AND key IN"
            " (SELECT key FROM claims WHERE scope = ? ORDER BY at LIMIT ?)",
            (scope, scope, count - MAX_CLAIMS),
        )


_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the class
        if code in _BUSY:
            raise UnavailableError("records are locked by another process", busy=True) from error
        if code == sqlite3.SQLITE_CONSTRAINT:
            raise ConflictError("the idempotency key is taken") from error
        if code == sqlite3.SQLITE_FULL:
            raise NoSpaceError(
                "no space left for the server's records", hint="free some on the disk of data_dir"
            ) from error
        if code in _BROKEN:
            raise UnavailableError(
                f"{path} is damaged: {error}", hint="move it away; running sandboxes end then"
            ) from error
        raise UnavailableError(f"cannot use the records in {path}: {error}") from error
    except OSError as error:
        why = error.strerror
        raise UnavailableError(f"cannot use the records in {path}: {why}") from error
