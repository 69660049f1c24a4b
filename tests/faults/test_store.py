"""Records that another process has locked, and two servers on one store."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.faults.calls import attempt, create, delete, execute
from tests.faults.machine import Machine, machine, running
from tests.support import free_port
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

BOUND = 8.0  # seconds in which an answer comes; the store is given up on after two


@contextmanager
def locked(base: Path) -> Iterator[None]:
    with closing(sqlite3.connect(base / "data/capsule.db", isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            db.execute("ROLLBACK")


async def timed(call: asyncio.Task[httpx.Response]) -> tuple[int, float]:
    began = time.monotonic()
    answer = await call
    return answer.status_code, time.monotonic() - began


@pytest.mark.slow
async def test_locked_records_are_a_503_and_not_a_hang(own_nursery: Nursery) -> None:
    async with running(own_nursery) as host, host.http() as http:
        id, doomed = await create(http), await create(http)
        began = time.monotonic()
        with locked(host.base):
            while time.monotonic() - began < 3.0:
                calls = [
                    asyncio.create_task(http.post("/v1/sandboxes", json={"template": "bash"}))
                    for _ in range(4)
                ]
                calls.append(asyncio.create_task(http.post(f"/v1/sandboxes/{id}/keepalive")))
                assert await host.health() == 200
                assert (await execute(http, id, "echo fine"))["stdout"] == "fine\n"
                for status, took in await asyncio.gather(*map(timed, calls)):
                    assert status == 503
                    assert took < BOUND
            # Nothing is left of it though its row cannot go yet.
            assert await delete(http, doomed) == 200
            assert not (host.base / "run/boxes" / doomed).exists()
            assert (await attempt(http, doomed, "true")).status_code == 410
        assert (await http.post(f"/v1/sandboxes/{id}/keepalive")).status_code == 200
        await delete(http, await create(http))
        await host.agree()
        assert list(await host.listed()) == [id]


async def test_a_key_used_while_records_were_locked_can_be_used_again(
    own_nursery: Nursery,
) -> None:
    async with running(own_nursery) as host, host.http() as http:

        async def make() -> httpx.Response:
            key = {"Idempotency-Key": "k"}
            return await http.post("/v1/sandboxes", json={"template": "bash"}, headers=key)

        with locked(host.base):
            assert (await make()).status_code == 503
        first, again = await make(), await make()
        assert first.json()["id"] == again.json()["id"]
        assert len(await host.listed()) == 1


@pytest.mark.parametrize("shared", ["DATA_DIR", "RUN_DIR"])
async def test_a_second_server_on_one_store_refuses_and_harms_nobody(
    own_nursery: Nursery, shared: str
) -> None:
    async with running(own_nursery) as host, host.http() as http:
        id = await create(http)
        async with machine(own_nursery) as second:
            other = Machine(own_nursery, second.base)
            other.env[f"CAPSULE_{shared}"] = host.env[f"CAPSULE_{shared}"]
            other.env["CAPSULE_PORT"] = str(free_port())
            other.spawn()
            assert await other.ended() == 1
            said = other.log()
        assert "another server uses" in said
        assert f"process {host.pid}" in said
        assert "Traceback" not in said
        assert (await execute(http, id, "echo fine"))["stdout"] == "fine\n"


async def test_a_damaged_store_is_said_so_at_the_start(own_nursery: Nursery) -> None:
    async with machine(own_nursery) as host:
        (host.base / "data").mkdir(mode=0o711, exist_ok=True)
        (host.base / "data/capsule.db").write_bytes(b"not a database" * 1000)
        host.spawn()
        assert await host.ended() == 1
        assert "is damaged" in host.log()
        assert "Traceback" not in host.log()
