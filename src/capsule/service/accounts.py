"""The file of keys and quotas: `accounts.db` in the data directory, beside what is recorded.

A file of its own, since others write to it as well: `capsule key` on the server's machine does,
with or without a server. Every call opens it, does one thing and closes it, and blocks; calls are
rare. `Watch` says cheaply whether somebody has written.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from base64 import b32encode
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from capsule.errors import ConflictError, NotFoundError
from capsule.service import validate
from capsule.service.caller import KeyScope, check_scopes, check_tenant
from capsule.service.database import translated
from capsule.service.lock import make_private
from capsule.settings import brief

NAME = "accounts.db"
PREFIX = "cap"
PATIENCE = 5.0  # for another process that writes

_VERSION = 1
_SCHEMA = """
CREATE TABLE keys (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, digest BLOB NOT NULL,
    scopes TEXT NOT NULL, created REAL NOT NULL, expires REAL, revoked REAL, used REAL
) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
_LATER = (
    "CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, quota TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS cpu (tenant TEXT NOT NULL, period TEXT NOT NULL,"
    " milliseconds REAL NOT NULL, PRIMARY KEY (tenant, period))",
)
_COLUMNS = "id, tenant, name, digest, scopes, created, expires, revoked, used"


@dataclass(frozen=True, slots=True)
class Key:
    id: str
    tenant: str
    name: str
    digest: bytes  # of its secret
    scopes: tuple[KeyScope, ...]
    created: float  # wall clock, as the others
    expires: float | None = None  # None: never
    revoked: float | None = None
    used: float | None = None  # the last time, to the minute

    def state(self, now: float) -> str:
        if self.revoked is not None:
            return "revoked"
        return "active" if self.expires is None or now < self.expires else "expired"


class NewKey(NamedTuple):
    key: Key
    token: str  # what its holder sends; it cannot be had again


def token_of(id: str, secret: str) -> str:
    return f"{PREFIX}_{id}_{secret}"


def split(token: str) -> tuple[str, str]:
    """A key's id and its secret; two empty strings: it is none of ours."""
    parts = token.split("_", 2)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == PREFIX else ("", "")


def digest_of(secret: str) -> bytes:
    """Of 256 random bits: nobody tries them all, so a fast hash is as good as a slow one."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class AccountFile:
    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / NAME

    def exists(self) -> bool:
        return self.path.exists()

    def keys(self, tenant: str | None = None) -> list[Key]:
        """Oldest first, also those that are over."""
        if not self.exists():
            return []
        with self._open() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created, id").fetchall()
        return [key for row in rows if tenant in (None, (key := _key(row)).tenant)]

    def create_key(
        self,
        *,
        tenant: str,
        scopes: tuple[str, ...],
        now: float,
        name: str = "",
        expires: float | None = None,
    ) -> NewKey:
        """Raises InvalidError."""
        secret = secrets.token_urlsafe(32)
        key = Key(
            id=b32encode(secrets.token_bytes(10)).decode().lower(),
            tenant=check_tenant(tenant),
            name=validate.text("name", name, most=256),
            digest=digest_of(secret),
            scopes=check_scopes(scopes),
            created=now,
            expires=expires,
        )
        row = (key.id, key.tenant, key.name, key.digest, " ".join(key.scopes), now, expires)
        with self._open() as db:
            db.execute(
                f"INSERT INTO keys ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL)", row
            )
        return NewKey(key, token_of(key.id, secret))

    def revoke_key(self, id: str, now: float) -> Key:
        """It stays in the list. Again: the first time counts. Raises NotFoundError."""
        with self._open() as db:
            db.execute("UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL", (now, id))
            row = db.execute(f"SELECT {_COLUMNS} FROM keys WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise NotFoundError(
                f"key {brief(id)} does not exist",
                hint="list the keys; its id is between the underscores",
                key_id=id[:80],
            )
        return _key(row)

    def note_use(self, used: Mapping[str, float]) -> None:
        with self._open() as db:
            db.executemany(
                "UPDATE keys SET used = max(coalesce(used, 0), ?) WHERE id = ?",
                [(at, id) for id, at in used.items()],
            )

    def quotas(self) -> dict[str, dict[str, Any]]:
        """What was set for each tenant."""
        if not self.exists():
            return {}
        with self._open() as db:
            rows = db.execute("SELECT name, quota FROM tenants ORDER BY name").fetchall()
        return {name: json.loads(quota) for name, quota in rows}

    def set_quota(self, tenant: str, changes: Mapping[str, Any], reset: bool = False) -> None:
        """`reset` forgets first what was set."""
        with self._open() as db:
            row = db.execute("SELECT quota FROM tenants WHERE name = ?", (tenant,)).fetchone()
            own = {**(json.loads(row[0]) if row and not reset else {}), **changes}
            db.execute("INSERT OR REPLACE INTO tenants VALUES (?, ?)", (tenant, json.dumps(own)))

    def cpu_used(self, period: str) -> dict[str, float]:
        """Milliseconds, by tenant."""
        if not self.exists():
            return {}
        with self._open() as db:
            query = "SELECT tenant, milliseconds FROM cpu WHERE period = ?"
            return dict(db.execute(query, (period,)).fetchall())

    def add_cpu(self, period: str, used: Mapping[str, float]) -> None:
        with self._open() as db:
            db.executemany(
                "INSERT INTO cpu VALUES (?1, ?2, ?3) ON CONFLICT (tenant, period)"
                " DO UPDATE SET milliseconds = milliseconds + ?3",
                [(tenant, period, cpu) for tenant, cpu in used.items()],
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """All that is done inside, or nothing. Raises UnavailableError, NoSpaceError."""
        make_private(self.path.parent)
        with translated(self.path), closing(self._connect()) as db:
            db.execute("BEGIN IMMEDIATE")
            self._prepare(db)
            yield db
            db.execute("COMMIT")

    def _connect(self) -> sqlite3.Connection:
        self.path.touch(mode=0o600)
        db = sqlite3.connect(
            self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a key that was revoked stays so
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in _SCHEMA.split(";")[:-1]:
                db.execute(statement)
        elif version != _VERSION:
            raise ConflictError(
                f"{self.path} has format {version}, this version of Capsule knows {_VERSION}",
                hint="use that version, or another data_dir",
            )
        for statement in _LATER:
            db.execute(statement)


class Watch:
    """Whether the file was written since one last asked, by whomever. Blocks."""

    def __init__(self, file: AccountFile) -> None:
        self._file = file
        self._db: sqlite3.Connection | None = None
        self._seen = -1

    def changed(self) -> bool:
        if self._db is None:
            if not self._file.exists():
                return False
            self._db = self._file._connect()
        with translated(self._file.path):
            now: int = self._db.execute("PRAGMA data_version").fetchone()[0]
        seen, self._seen = self._seen, now
        return seen != now

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _key(row: tuple[str, str, str, bytes, str, float, float, float, float]) -> Key:
    id, tenant, name, digest, scopes, created, expires, revoked, used = row
    known = tuple(KeyScope(scope) for scope in scopes.split())
    return Key(id, tenant, name, digest, known, created, expires, revoked, used)
