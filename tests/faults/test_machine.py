"""The checker itself: what disagrees is seen."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from tests.faults.calls import create, start
from tests.faults.footprint import Footprint, sort_processes
from tests.faults.machine import running
from tests.support.nursery import Nursery

pytestmark = pytest.mark.real


async def test_a_box_without_a_row_is_seen_in_every_place(own_nursery: Nursery) -> None:
    async with running(own_nursery) as machine, machine.http() as http:
        id = await create(http)
        await machine.agree()
        with closing(sqlite3.connect(machine.base / "data/capsule.db")) as db:
            (row,) = db.execute("SELECT * FROM sandboxes").fetchall()
            db.execute("DELETE FROM sandboxes")
            db.commit()
            found = machine.footprint().differences()
            assert f"folders: {id} has no row" in found
            assert f"keepers: {id} has no row" in found
            for controller in machine.footprint().cgroups:
                assert f"{controller} cgroups: {id} has no row" in found
            db.execute("INSERT INTO sandboxes VALUES (?, ?, ?, ?)", row)
            db.commit()
        await machine.agree()


async def test_a_row_without_a_box_is_seen(own_nursery: Nursery) -> None:
    async with running(own_nursery) as machine:
        with closing(sqlite3.connect(machine.base / "data/capsule.db")) as db:
            db.execute("INSERT INTO sandboxes VALUES ('nobody', 0, 'running', '{}')")
            db.commit()
            assert "keepers: none for nobody" in machine.footprint().differences()
            db.execute("DELETE FROM sandboxes")
            db.commit()


async def test_what_has_no_keeper_is_a_stray(own_nursery: Nursery, as_root: None) -> None:
    async with running(own_nursery) as machine, machine.http() as http:
        id = await create(http)
        await start(http, id, "sleep 1000")
        assert machine.footprint().strays == []
        ignored = frozenset({machine.pid, *machine.not_ours()})
        alone = Footprint()
        nobody: dict[str, str] = {}  # listens
        sort_processes(alone, machine.base, nobody, None, ignored, machine.since)
        names = [process.name for process in alone.strays]
        assert "sleep" in names
        assert names.count("capsule-agent") >= 3  # launcher, keeper, pid 1
