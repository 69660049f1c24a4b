"""The records of sandboxes: what goes with them, and a database that is full or newer.

That each field comes back is in test_service_restart.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from capsule.catalog import load_catalog
from capsule.errors import ConflictError, NoSpaceError
from capsule.model import Limits, SandboxId, State
from capsule.service.carry import Session
from capsule.service.entry import Record
from capsule.service.store import CREATE, KEEP_CLAIMS, Claim, SqliteStore

PYTHON = load_catalog(None)["python"]


def record(id: str = "a", **fields: object) -> Record:
    made = Record(
        id=SandboxId(id),
        state=State.CREATING,
        template=PYTHON,
        provider="local",
        limits=Limits(memory=1 << 30),
        env={"A": "ü"},
        metadata={"user": "ann"},
        ttl=600.0,
        idle_timeout=0.0,
        created=1000.5,
        expires=1600.5,
        deadline=77.0,
        boot="b",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    made = SqliteStore(tmp_path / "capsule.db")
    await made.open()
    yield made
    await made.aclose()


async def test_saving_again_replaces_and_removing_takes_all_of_it(store: SqliteStore) -> None:
    await store.save(record("a"))
    await store.save(record("a", state=State.RUNNING))
    await store.save_session(SandboxId("a"), "s", Session({"A": "1"}, ("B",), "/tmp"))
    await store.claim(Claim("a", "k", "f", "e1", 1.0))
    assert [r.state for r in await store.load()] == [State.RUNNING]
    assert await store.sessions(SandboxId("a")) == {"s": Session({"A": "1"}, ("B",), "/tmp")}
    await store.remove(SandboxId("a"))
    assert await store.load() == []
    assert await store.sessions(SandboxId("a")) == {}
    assert await store.find("a", "k") is None


async def test_records_and_their_claim_come_together_or_not_at_all(store: SqliteStore) -> None:
    await store.save(record("a"), claim=Claim(CREATE, "k", "f", "a", 1.0))
    with pytest.raises(ConflictError):
        await store.save(record("b"), record("c"), claim=Claim(CREATE, "k", "f", "b", 1.0))
    assert [r.id for r in await store.load()] == ["a"]


async def test_claims_of_creates_are_kept_a_day_and_as_long_as_the_sandbox(
    store: SqliteStore,
) -> None:
    await store.save(record("lives"), claim=Claim(CREATE, "old-alive", "f", "lives", 0.0))
    await store.claim(Claim(CREATE, "old-gone", "f", "gone", 0.0))
    await store.claim(Claim(CREATE, "new-gone", "f", "gone", 100.0))
    await store.maintain(KEEP_CLAIMS + 50.0)
    kept = [k for k in ("old-alive", "old-gone", "new-gone") if await store.find(CREATE, k)]
    assert kept == ["old-alive", "new-gone"]


async def test_a_full_disk_is_no_space_and_passes(store: SqliteStore) -> None:
    db = store._db._db
    assert db is not None
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 2}")
    big = record("big", env={str(n): "x" * 1000 for n in range(200)})
    for change in (store.save(big), store.save(big, claim=Claim(CREATE, "k", "f", "big", 1.0))):
        with pytest.raises(NoSpaceError, match="no space left"):
            await change
    assert await store.find(CREATE, "k") is None
    await store.save(record("small"))
    db.execute("PRAGMA max_page_count = 100000")
    await store.save(big)
    assert len(await store.load()) == 2


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "capsule.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConflictError, match="format 99"):
        await SqliteStore(path).open()
