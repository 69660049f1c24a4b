"""The execution log: a change is found, and its limits keep the chain whole."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.sessions.execution import Logged
from capsule.sessions.ledger import Ledger, verify_file
from capsule.sessions.records import Artifact, Outcome, Phase, Session, Task

CAP = 10


def session(id: str = "s", **more: object) -> Session:
    made = Session(
        uid=f"uid-{id}",
        id=id,
        phase=Phase.OPEN,
        environment="python",
        template="python",
        created=1.0,
        active=1.0,
        idle_timeout=60.0,
        sandbox_id="box",
    )
    return replace(made, **more)  # type: ignore[arg-type]


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    made = Ledger(tmp_path / "sessions.db")
    await made.open()
    yield made
    await made.aclose()


async def run(ledger: Ledger, of: Session, code: str, at: float = 5.0, out: bytes = b"") -> int:
    running = await ledger.begin(of, Task("code", code), at)
    return (await ledger.append(of, running, Outcome("ok", stdout=out), cap=CAP)).number


async def whole_log(ledger: Ledger, of: Session) -> list[Logged]:
    return await ledger.log(of, after=0, limit=999, most=10**6)


def artifact(of: Session, name: str, size: int = 1, created: float = 5.0) -> Artifact:
    return Artifact(
        f"{of.uid}-{name}", of.uid, 0, name, "file", "text/plain", size, f"hash-{name}", created
    )


async def filled(ledger: Ledger) -> list[Session]:
    ours, theirs = session("a"), session("b", tenant="other")
    for each in (ours, theirs):
        await ledger.add(each)
    for number in range(3):
        assert await run(ledger, ours, f"print({number})", out=b"0123456789abc") == number + 1
        assert await run(ledger, theirs, "secret") == number + 1
    return [ours, theirs]


def tamper(tmp_path: Path, statement: str) -> None:
    db = sqlite3.connect(tmp_path / "sessions.db")
    with db:
        db.execute(statement)
    db.close()


async def test_an_unchanged_log_is_whole(ledger: Ledger, tmp_path: Path) -> None:
    empty = verify_file(tmp_path / "sessions.db")
    assert (empty.entries, empty.broken) == (0, ())
    await filled(ledger)
    verdict = verify_file(tmp_path / "sessions.db")
    assert (verdict.entries, verdict.broken) == (6, ())
    assert verify_file(tmp_path / "sessions.db", verdict.head).broken == ()
    (ours, _) = await ledger.list()
    await run(ledger, ours, "more")
    assert verify_file(tmp_path / "sessions.db", verdict.head).broken == ()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE log SET body = replace(body, 'ok', 'no') WHERE seq = 3", "does not have its hash"),
        ("DELETE FROM log WHERE seq = 3", "entry 3 is missing"),
        ("DELETE FROM log WHERE session = 'uid-b'", "is missing"),
        ("UPDATE log SET seq = 99 WHERE seq = 6", "it says that it is entry 6"),
        ("UPDATE texts SET stdout = 'x' WHERE seq = 3", "its stdout does not have the hash"),
        ("DELETE FROM log WHERE seq = 1", "entry 1 is missing"),
    ],
)
async def test_a_change_is_found(
    ledger: Ledger, tmp_path: Path, statement: str, problem: str
) -> None:
    await filled(ledger)
    tamper(tmp_path, statement)
    verdict = verify_file(tmp_path / "sessions.db")
    assert any(problem in each.problem for each in verdict.broken), verdict.broken


async def test_a_removed_end_is_found_by_its_head(ledger: Ledger, tmp_path: Path) -> None:
    await filled(ledger)
    head = verify_file(tmp_path / "sessions.db").head
    tamper(tmp_path, "DELETE FROM log WHERE seq = 6")
    assert verify_file(tmp_path / "sessions.db").broken == ()
    assert "not in the log" in verify_file(tmp_path / "sessions.db", head).broken[0].problem


async def test_text_can_be_removed_from_a_whole_log(ledger: Ledger, tmp_path: Path) -> None:
    ours, theirs = await filled(ledger)
    await ledger.forget(theirs)
    assert verify_file(tmp_path / "sessions.db").broken == ()
    assert [each.texts.command for each in await whole_log(ledger, theirs)] == [None] * 3
    assert (await whole_log(ledger, ours))[0].texts.stdout == b"0123456789"  # up to the cap
    for _ in range(300):
        await run(ledger, ours, "x" * CAP)
    await ledger.shrink(CAP * 100)
    log = await whole_log(ledger, ours)
    assert log[0].texts.command is None and log[-1].texts.command is not None
    assert verify_file(tmp_path / "sessions.db").broken == ()


async def test_old_entries_are_removed_from_the_beginning_only(
    ledger: Ledger, tmp_path: Path
) -> None:
    one = session("a")
    await ledger.add(one)
    for at in (10.0, 20.0, 5.0, 30.0):  # a clock that was set back makes no hole
        await run(ledger, one, "x", at)
    await ledger.expire(15.0)
    assert [each.number for each in await whole_log(ledger, one)] == [2, 3, 4]
    assert verify_file(tmp_path / "sessions.db").broken == ()
    await ledger.expire(1000.0)
    assert verify_file(tmp_path / "sessions.db").entries == 0
    assert await run(ledger, one, "y") == 5  # a number is given once
    verdict = verify_file(tmp_path / "sessions.db")
    assert (verdict.entries, verdict.broken) == (1, ())


async def test_an_unfinished_run_is_found_after_a_restart(ledger: Ledger, tmp_path: Path) -> None:
    one = session("a")
    await ledger.add(one)
    await ledger.begin(one, Task("code", "while True: pass"), 7.0)
    dropped = await ledger.begin(one, Task("code", "no"), 7.0)
    await ledger.drop(dropped)
    again = Ledger(tmp_path / "sessions.db")
    await again.open()
    ((of, running),) = await again.left_running()
    assert of == one and running.task.command == "while True: pass" and running.started == 7.0
    await again.append(of, running, Outcome("lost"), cap=CAP)
    assert await again.left_running() == []
    await again.aclose()


async def test_equal_contents_of_a_tenant_count_once(ledger: Ledger, tmp_path: Path) -> None:
    for id, tenant in (("a", "red"), ("b", "red"), ("c", "blue")):
        one = session(id, uid=id, tenant=tenant)
        await ledger.add(one)
        running = await ledger.begin(one, Task("code", "x"), 5.0)
        same = replace(artifact(one, "x", 100, 1.0), id=f"of-{id}")
        await ledger.append(one, running, Outcome("ok"), (same,), cap=CAP)
    assert ledger.stored == {"red": 100, "blue": 100}
    found = await ledger.find("red", "a")
    assert found is not None and await ledger.forget(found) == ["hash-x"]
    assert ledger.stored == {"red": 100, "blue": 100}
    again = Ledger(tmp_path / "sessions.db")
    await again.open()
    assert again.stored == ledger.stored
    await again.aclose()
    await ledger.expire(2.0)
    assert not +ledger.stored
