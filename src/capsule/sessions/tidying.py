"""What is removed from the records of sessions by age and by size, a few rows in each transaction;
and how much of them there is. Used by `ledger`.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from capsule.sessions.retention import Item

A_TIME = 256


class Step(NamedTuple):
    more: bool  # there may be
    freed: Counter[str]  # bytes of artifacts, by tenant


def old_artifacts(db: sqlite3.Connection, before: float) -> Step:
    rows = db.execute("SELECT id FROM artifacts WHERE created < ? LIMIT ?", (before, A_TIME))
    ids = [id for (id,) in rows.fetchall()]
    return Step(len(ids) == A_TIME, remove_artifacts(db, ids))


def some_artifacts(db: sqlite3.Connection, ids: list[str]) -> Step:
    """Takes from the end of `ids` those that it removes."""
    some = ids[-A_TIME:]
    freed = remove_artifacts(db, some)
    del ids[-A_TIME:]
    return Step(bool(ids), freed)


def remove_artifacts(db: sqlite3.Connection, ids: Iterable[str]) -> Counter[str]:
    """How many bytes less each tenant has."""
    freed = Counter[str]()
    for id in ids:
        query = "SELECT tenant, sha256, size FROM artifacts WHERE id = ?"
        for tenant, sha256, size in db.execute(query, (id,)).fetchall():
            db.execute("DELETE FROM artifacts WHERE id = ?", (id,))
            freed[tenant] += 0 if has_content(db, tenant, sha256) else size
    return freed


def has_content(db: sqlite3.Connection, tenant: str, sha256: str) -> bool:
    query = "SELECT 1 FROM artifacts WHERE sha256 = ? AND tenant = ? LIMIT 1"
    return db.execute(query, (sha256, tenant)).fetchone() is not None


def cut_log(db: sqlite3.Connection, before: float) -> Step:
    """From the beginning alone: the chain must not get holes."""
    first = db.execute("SELECT seq, hash, started FROM log ORDER BY seq LIMIT ?", (A_TIME,))
    old = list(itertools.takewhile(lambda row: row[2] < before, first.fetchall()))
    if old:
        seq, hash, _ = old[-1]
        db.execute(_NOTE_NUMBERS, (seq,))
        db.execute("DELETE FROM log WHERE seq <= ?", (seq,))
        db.execute("DELETE FROM texts WHERE seq <= ?", (seq,))
        db.execute("DELETE FROM anchors")
        db.execute("INSERT INTO anchors VALUES (?, ?)", (seq, hash))
    return Step(len(old) == A_TIME, Counter())


_NOTE_NUMBERS = (
    "INSERT INTO numbers SELECT session, max(number) FROM log"
    " WHERE seq <= ? AND session IN (SELECT uid FROM sessions) GROUP BY session"
    " ON CONFLICT (session) DO UPDATE SET last = max(last, excluded.last)"
)


def old_sessions(db: sqlite3.Connection, before: float) -> Step:
    query = "SELECT uid FROM sessions WHERE phase = 'deleted' AND active < ? LIMIT ?"
    uids = db.execute(query, (before, A_TIME)).fetchall()
    db.executemany("DELETE FROM sessions WHERE uid = ?", uids)
    db.executemany("DELETE FROM numbers WHERE session = ?", uids)
    return Step(len(uids) == A_TIME, Counter())


def old_texts(db: sqlite3.Connection, tenant: str) -> int:
    """Remove the oldest of a tenant; how many bytes those had."""
    query = f"SELECT seq, {_TEXT} FROM texts JOIN log USING (seq) WHERE tenant = ? ORDER BY seq"
    rows = db.execute(f"{query} LIMIT ?", (tenant, A_TIME)).fetchall()
    db.executemany("DELETE FROM texts WHERE seq = ?", [(seq,) for seq, _ in rows])
    return sum(size for _, size in rows)


_TEXT = "ifnull(length(command), 0) + ifnull(length(stdout), 0) + ifnull(length(stderr), 0)"


def text_sizes(db: sqlite3.Connection) -> dict[str, int]:
    """Bytes of text in the log, by tenant."""
    query = f"SELECT tenant, sum({_TEXT}) FROM texts JOIN log USING (seq) GROUP BY tenant"
    return dict(db.execute(query).fetchall())


def artifact_sizes(db: sqlite3.Connection) -> dict[str, int]:
    """Bytes of artifacts, by tenant; what is the same counts once for each of them."""
    own = "SELECT DISTINCT tenant, sha256, size FROM artifacts"
    return dict(db.execute(f"SELECT tenant, sum(size) FROM ({own}) GROUP BY tenant").fetchall())


def artifact_items(db: sqlite3.Connection) -> Iterator[Item]:
    """Oldest first."""
    rows = db.execute("SELECT tenant, id, sha256, size FROM artifacts ORDER BY created, rowid")
    return (Item(*row) for row in rows)
