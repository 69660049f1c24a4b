"""The audit log: who did what, in a chain that shows every change."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import structlog

from capsule.audit.trail import FILE, Trail, verify_file
from capsule.config import Config
from capsule.model import ExecId, Exit, Reason, SandboxId
from capsule.service.happenings import Ended, Happening, Happenings, Kind
from tests.support import eventually
from tests.unit.service_double import TurnedClock


@asynccontextmanager
async def trail(
    folder: Path, *, mode: str = "yes", clock: TurnedClock | None = None
) -> AsyncIterator[tuple[Trail, Happenings]]:
    happenings = Happenings()
    config = Config(data_dir=folder, run_dir=Path("/run/capsule"), audit=mode)
    async with Trail(config, happenings, clock) as made:
        yield made, happenings


async def all_of(made: Trail, **wanted: object) -> list[dict[str, object]]:
    asked = {"tenant": None, "sandbox": None, "before": None, "most": 100, **wanted}
    return await made.entries(**asked)  # type: ignore[arg-type]


async def test_an_entry_has_actor_action_and_sandbox(tmp_path: Path) -> None:
    async with trail(tmp_path) as (made, happenings):
        with structlog.contextvars.bound_contextvars(key="k1", request="r1"):
            made.note("POST /v1/volumes", tenant="acme", status=201)
            exit = Exit(Reason.EXITED, 3, duration_ms=5.0)
            ended = Ended(ExecId("e1"), ("rm", "-rf", "secret"), exit)
            happenings.tell(
                Happening(Kind.FINISHED, 1.0, SandboxId("b1"), "bash", "local", "acme", exec=ended)
            )
        happenings.tell(
            Happening(Kind.EXPIRED, 2.0, SandboxId("b1"), "bash", "local", "acme", "its time")
        )

        async def three() -> list[dict[str, object]]:
            found = await all_of(made)
            return found if len(found) == 3 else []

        expired, finished, made_one = await eventually(three, what="written")
        assert (made_one["what"], made_one["actor"], made_one["request"]) == (
            *("POST /v1/volumes", "k1", "r1"),
        )
        assert made_one["status"] == 201
        assert (finished["sandbox"], finished["exec"], finished["exit_code"]) == ("b1", "e1", 3)
        assert finished["program"] == "rm"
        assert "secret" not in str(finished)
        assert (expired["actor"], expired["reason"]) == ("server", "its time")
        assert [each["seq"] for each in await all_of(made, sandbox="b1")] == [3, 2]
        assert await all_of(made, tenant="other") == []
        assert [each["seq"] for each in await all_of(made, before=3, most=1)] == [2]


async def test_the_chain_goes_on_after_a_restart_and_shows_changes(tmp_path: Path) -> None:
    for n in range(3):
        async with trail(tmp_path) as (made, _):
            for i in range(4):
                made.note(f"call {n} {i}", tenant="default")
    path = tmp_path / FILE
    verdict = verify_file(path)
    assert (verdict.entries, verdict.broken) == (12, ())
    for change in (
        "UPDATE trail SET body = replace(CAST(body AS TEXT), 'call 1 2', 'call 9 9')",
        "DELETE FROM trail WHERE seq = 5",
        "UPDATE trail SET seq = 50 WHERE seq = 12",
    ):
        other = tmp_path / "copy.db"
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(other)) as copy:
            source.backup(copy)
            copy.execute(change)
            copy.commit()
        assert verify_file(other).broken, change
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM trail WHERE seq > 10")
        db.commit()
    assert verify_file(path).broken == ()
    assert verify_file(path, verdict.head).broken


@pytest.mark.parametrize(("mode", "written"), [("auto", ["k1", "server"]), ("yes", ["local"])])
async def test_the_mode_decides_whether_calls_without_a_key_are_written(
    tmp_path: Path, mode: str, written: list[str]
) -> None:
    async with trail(tmp_path, mode=mode) as (made, _):
        with structlog.contextvars.bound_contextvars(key="local"):
            made.note("by the operator", tenant="default")
        if mode == "auto":
            made.note("by the server itself", tenant="default")
            with structlog.contextvars.bound_contextvars(key="k1"):
                made.note("by a key", tenant="default")
            await eventually(lambda: all_of(made), what="written")
            made.note("by the server itself", tenant="default")
    async with trail(tmp_path, mode=mode) as (made, _):
        found = await all_of(made)
    assert [each["actor"] for each in reversed(found)] == written


async def test_old_entries_are_removed_and_the_chain_stays_whole(tmp_path: Path) -> None:
    clock = TurnedClock()
    async with trail(tmp_path, clock=clock) as (made, _):
        for what in ("old", "new"):
            made.note(what, tenant="default")
            await eventually(lambda: all_of(made, most=1), what="written")
            clock.pass_time(91 * 86400)
        await made._forget(clock.now() - 92 * 86400)
        assert [each["what"] for each in await all_of(made)] == ["new"]
    verdict = verify_file(tmp_path / FILE)
    assert (verdict.entries, verdict.broken) == (1, ())
