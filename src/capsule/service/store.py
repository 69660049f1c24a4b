"""The records that survive the server.

In memory is what is true while the server runs; the store is read at the start and written at
each change, without an fsync (see `database`): what a power cut loses it ends as well, the boxes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from capsule.errors import InternalError
from capsule.model import SandboxId
from capsule.service.caller import DEFAULT_TENANT
from capsule.service.carry import Session
from capsule.service.context import ContextRecord
from capsule.service.database import Database, whole
from capsule.service.entry import Record

KEEP_CLAIMS = 24 * 3600.0
MAX_CLAIMS = 10_000  # per sandbox; the oldest are forgotten first

# The scope of keys given to create; others' begin with it, those of an exec have a sandbox's id.
CREATE = "create"

T = TypeVar("T")


def create_scope(tenant: str) -> str:
    """Two tenants may use the same key."""
    return CREATE if tenant == DEFAULT_TENANT else f"{CREATE}/{tenant}"


def ended_scope(id: SandboxId) -> str:
    """The execs with a key whose end was published; an exec's id is its key there."""
    return f"{id}/ended"


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

    async def save(self, *records: Record, claim: Claim | None = None) -> None:
        """Insert or replace; all of them, and the claim with them, or nothing. Raises ConflictError
        (the claim)."""

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
PRAGMA user_version = 2;
"""
# 2: what is recorded belongs to tenants. What was recorded before is the default tenant's, as the
# types say; a server that knows of no tenants must not serve one's things to another.
_VERSION = 2
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

# Not OR REPLACE, which makes the row and its place in the index anew: a third more of the log.
_SAVE = """
INSERT INTO sandboxes VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE
SET created = excluded.created, state = excluded.state, body = excluded.body
"""


class SqliteStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = Database(path, schema=_SCHEMA, version=_VERSION, later=_LATER, oldest=1)
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode

    async def open(self) -> None:
        await self._db.open()

    async def aclose(self) -> None:
        await self._db.aclose()

    async def load(self) -> list[Record]:
        decode = msgspec.json.Decoder(Record).decode
        rows = await self._db.run(
            lambda db: db.execute("SELECT body FROM sandboxes ORDER BY created, rowid").fetchall()
        )
        try:
            return [decode(body) for (body,) in rows]
        except msgspec.MsgspecError as error:
            raise InternalError(
                f"{self._path} holds a record that cannot be read: {error}"
            ) from error

    async def save(self, *records: Record, claim: Claim | None = None) -> None:
        rows = [(r.id, r.created, str(r.state), self._encode(r)) for r in records]

        def write(db: sqlite3.Connection) -> None:
            if claim is not None:
                db.execute("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", _claim_row(claim))
            for row in rows:
                db.execute(_SAVE, row)

        alone = claim is None and len(rows) == 1
        await self._db.run(write if alone else whole(write))

    async def remove(self, id: SandboxId) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sandboxes WHERE id = ?", (id,))
            db.execute("DELETE FROM sessions WHERE sandbox = ?", (id,))
            db.execute("DELETE FROM contexts WHERE sandbox = ?", (id,))
            db.execute("DELETE FROM claims WHERE scope IN (?, ?)", (id, ended_scope(id)))

        await self._db.run(whole(write))

    async def find(self, scope: str, key: str) -> Claim | None:
        return await self._db.run(lambda db: _find(db, scope, key))

    async def claim(self, claim: Claim) -> Claim:
        def write(db: sqlite3.Connection) -> Claim:
            held = _find(db, claim.scope, claim.key)
            if held is None:
                db.execute("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", _claim_row(claim))
            return held or claim

        return await self._db.run(whole(write))

    async def release(self, scope: str, key: str) -> None:
        await self._db.run(
            lambda db: db.execute("DELETE FROM claims WHERE scope = ? AND key = ?", (scope, key))
        )

    async def sessions(self, id: SandboxId) -> dict[str, Session]:
        rows = await self._db.run(
            lambda db: db.execute(
                "SELECT name, body FROM sessions WHERE sandbox = ?", (id,)
            ).fetchall()
        )
        return {name: msgspec.json.decode(body, type=Session) for name, body in rows}

    async def save_session(self, id: SandboxId, name: str, session: Session) -> None:
        row = (id, name, self._encode(session))
        await self._db.run(
            lambda db: db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", row)
        )

    async def forget_sessions(self, id: SandboxId) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sessions WHERE sandbox = ?", (id,))
            db.execute("DELETE FROM contexts WHERE sandbox = ?", (id,))

        await self._db.run(whole(write))

    async def contexts(self, id: SandboxId) -> list[ContextRecord]:
        rows = await self._db.run(
            lambda db: db.execute("SELECT body FROM contexts WHERE sandbox = ?", (id,)).fetchall()
        )
        found = [msgspec.json.decode(body, type=ContextRecord) for (body,) in rows]
        return sorted(found, key=lambda record: record.created)

    async def save_context(self, id: SandboxId, record: ContextRecord) -> None:
        row = (id, record.id, self._encode(record))
        await self._db.run(
            lambda db: db.execute("INSERT OR REPLACE INTO contexts VALUES (?, ?, ?)", row)
        )

    async def remove_context(self, id: SandboxId, name: str) -> None:
        await self._db.run(
            lambda db: db.execute("DELETE FROM contexts WHERE sandbox = ? AND name = ?", (id, name))
        )

    async def load_kept(self, kind: str, type: type[T]) -> list[T]:
        rows = await self._db.run(
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
        await self._db.run(
            lambda db: db.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)", row)
        )

    async def remove_kept(self, kind: str, name: str) -> None:
        await self._db.run(
            lambda db: db.execute("DELETE FROM kept WHERE kind = ? AND name = ?", (kind, name))
        )

    async def maintain(self, now: float) -> None:
        await self._db.run(lambda db: _forget_claims(db, now))
        await self._db.checkpoint()

    async def trim(self) -> None:
        await self._db.trim()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in a record")


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
        "DELETE FROM claims WHERE (scope = ? OR scope LIKE ?) AND at < ?"
        " AND target NOT IN (SELECT id FROM sandboxes)",
        (CREATE, f"{CREATE}/%", now - KEEP_CLAIMS),
    )
    crowded = db.execute(
        "SELECT scope, count(*) FROM claims WHERE scope <> ? AND scope NOT LIKE ?"
        " GROUP BY scope HAVING count(*) > ?",
        (CREATE, f"{CREATE}/%", MAX_CLAIMS),
    ).fetchall()
    for scope, count in crowded:
        db.execute(
            "DELETE FROM claims WHERE scope = ? AND key IN"
            " (SELECT key FROM claims WHERE scope = ? ORDER BY at LIMIT ?)",
            (scope, scope, count - MAX_CLAIMS),
        )
