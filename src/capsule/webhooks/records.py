"""Webhooks and their deliveries, in a SQLite file of their own."""

from __future__ import annotations

import asyncio
import functools
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from capsule.service.database import Database, whole

_SCHEMA = """
CREATE TABLE hook (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, url TEXT NOT NULL, events TEXT NOT NULL,
    secret TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE delivery (
    id TEXT PRIMARY KEY, hook TEXT NOT NULL, event TEXT NOT NULL, body BLOB NOT NULL,
    created REAL NOT NULL, state TEXT NOT NULL, attempts TEXT NOT NULL, due REAL NOT NULL
);
CREATE INDEX delivery_due ON delivery (state, due);
CREATE INDEX delivery_hook ON delivery (hook, created);
PRAGMA user_version = 1;
"""
A_TIME = 500  # deliveries that are removed in one transaction
_COLUMNS = "id, hook, event, body, created, state, attempts, due"


class Delivered(StrEnum):
    PENDING = "pending"
    DONE = "delivered"
    FAILED = "failed"  # all attempts were used up


@dataclass(frozen=True, slots=True)
class Webhook:
    id: str
    tenant: str
    url: str
    events: tuple[str, ...]
    secret: str
    created: float


@dataclass(frozen=True, slots=True)
class Attempt:
    at: float
    ms: float
    status: int | None = None  # none: there was no answer
    error: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    id: str
    hook: str
    event: str
    body: bytes
    created: float
    state: Delivered = Delivered.PENDING
    attempts: tuple[Attempt, ...] = field(default=())
    due: float = 0.0

    def after(self, attempt: Attempt, state: Delivered, due: float) -> Delivery:
        return replace(self, attempts=(*self.attempts, attempt), state=state, due=due)


class Book:
    def __init__(self, path: Path) -> None:
        self._db = Database(path, schema=_SCHEMA, version=1)

    async def open(self) -> None:
        await self._db.open()

    async def aclose(self) -> None:
        await self._db.aclose()

    async def hooks(self) -> list[Webhook]:
        rows = await self._db.run(lambda db: db.execute("SELECT * FROM hook").fetchall())
        return [Webhook(id, t, url, tuple(json.loads(e)), s, c) for id, t, url, e, s, c in rows]

    async def add(self, hook: Webhook) -> None:
        values = (hook.id, hook.tenant, hook.url, json.dumps(hook.events), hook.secret)
        statement = "INSERT INTO hook VALUES (?, ?, ?, ?, ?, ?)"
        await self._db.run(lambda db: db.execute(statement, (*values, hook.created)))

    async def remove(self, id: str) -> None:
        def both(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM hook WHERE id = ?", (id,))
            db.execute("DELETE FROM delivery WHERE hook = ?", (id,))

        await self._db.run(whole(both))

    async def save(self, deliveries: Sequence[Delivery]) -> None:
        rows = [_row(delivery) for delivery in deliveries]
        statement = f"INSERT OR REPLACE INTO delivery ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        await self._db.run(whole(lambda db: db.executemany(statement, rows)))
        await self._db.trim()

    async def pending(self) -> list[Delivery]:
        """What is still to be delivered, the oldest first."""
        return await self._select("WHERE state = 'pending' ORDER BY created")

    async def of(self, hook: str, most: int) -> list[Delivery]:
        """The newest first."""
        return await self._select("WHERE hook = ? ORDER BY created DESC LIMIT ?", hook, most)

    async def find(self, hook: str, id: str) -> Delivery | None:
        found = await self._select("WHERE hook = ? AND id = ?", hook, id)
        return found[0] if found else None

    async def forget(self, before: float, most: int) -> None:
        """What was settled before then, and of each hook more than the newest `most`. A few at a
        time: there may be many, and a transaction holds up the loop."""
        for hook in await self.hooks():
            more = True
            while more:
                some = functools.partial(_forget, hook=hook.id, before=before, most=most)
                more = await self._db.run(whole(some)) > 0
                await asyncio.sleep(0)  # whoever else has something to do
        await self._db.checkpoint()

    async def _select(self, rest: str, *values: object) -> list[Delivery]:
        statement = f"SELECT {_COLUMNS} FROM delivery {rest}"
        rows = await self._db.run(lambda db: db.execute(statement, values).fetchall())
        return [_delivery(row) for row in rows]


def _forget(db: sqlite3.Connection, *, hook: str, before: float, most: int) -> int:
    settled = "SELECT rowid FROM delivery WHERE hook = ? AND state != 'pending'"
    newest_first = "ORDER BY created DESC, rowid DESC"
    removed = 0
    for query, value in (
        (f"{settled} AND created < ? {newest_first} LIMIT {A_TIME}", before),
        (f"{settled} {newest_first} LIMIT {A_TIME} OFFSET ?", most),
    ):
        statement = f"DELETE FROM delivery WHERE rowid IN ({query})"
        removed += db.execute(statement, (hook, value)).rowcount
    return removed


def _row(d: Delivery) -> tuple[object, ...]:
    attempts = json.dumps([asdict(attempt) for attempt in d.attempts])
    return d.id, d.hook, d.event, d.body, d.created, str(d.state), attempts, d.due


def _delivery(row: tuple[str, str, str, bytes, float, str, str, float]) -> Delivery:
    id, hook, event, body, created, state, attempts, due = row
    tried = tuple(Attempt(**each) for each in json.loads(attempts))
    return Delivery(id, hook, event, body, created, Delivered(state), tried, due)
