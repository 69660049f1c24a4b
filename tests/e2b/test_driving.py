"""Capsule drives E2B: a server whose sandboxes are in a cloud, and a second Capsule is the cloud.

What a box does is in the contract (tests/contract/test_e2b.py). Here is a whole server, with keys,
and a cloud that refuses, is down, or loses a sandbox.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.client import Api, RpcFailure
from tests.support import eventually
from tests.support.folders import server_folder
from tests.support.servers import RealServer, real_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
OTHER = "e2b_fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture(scope="session")
def cloud() -> Iterator[RealServer]:
    with real_server(API_KEYS=f"{KEY},{OTHER}", MAX_SANDBOXES="8") as running:
        yield running


def settings(cloud: RealServer, **more: str) -> dict[str, str]:
    urls = {"E2B_API_URL": cloud.url, "E2B_SANDBOX_URL": cloud.url}
    return {"PROVIDER": "e2b", "E2B_API_KEY": KEY, **urls, **more}


@pytest.fixture(scope="session")
def driver(cloud: RealServer) -> Iterator[RealServer]:
    """A server whose sandboxes are in the cloud. Shared: leave nothing in it."""
    with real_server(**settings(cloud)) as running:
        yield running


@asynccontextmanager
async def talking(server: RealServer, key: str | None = None) -> AsyncIterator[Api]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=server.url, timeout=30, headers=headers) as http:
        yield Api(http)


@pytest.fixture
async def api(driver: RealServer) -> AsyncIterator[Api]:
    async with talking(driver) as found:
        yield found


async def create(api: Api, **options: Any) -> dict[str, Any]:
    made: dict[str, Any] = await api.rpc("create", template="python", ttl_ms=600_000, **options)
    return made


@pytest.fixture
async def box(api: Api) -> AsyncIterator[str]:
    made = await create(api)
    yield made["id"]
    await api.http.delete(f"/v1/sandboxes/{made['id']}")


async def in_the_cloud(cloud: RealServer) -> list[dict[str, Any]]:
    async with talking(cloud, KEY) as api:
        found: list[dict[str, Any]] = (await api.rpc("list"))["sandboxes"]
    return [each for each in found if each["state"] != "stopping"]


async def refused(api: Api, **options: Any) -> RpcFailure:
    with pytest.raises(RpcFailure) as failure:
        await create(api, **options)
    return failure.value


async def test_what_a_sandbox_is(api: Api, box: str, cloud: RealServer) -> None:
    made = await api.rpc("get", id=box)
    assert (made["provider"], made["isolation"]) == ("e2b", "cloud")
    assert {gap["what"] for gap in made["unenforced"]} >= {"memory", "cpus", "disk"}
    (there,) = [each for each in await in_the_cloud(cloud) if each["id"] == made["about"]["cloud"]]
    assert there["metadata"]["capsule-id"] == box
    assert KEY not in str(made) and KEY not in str(there)


async def test_a_pause_is_the_clouds_and_keeps_memory(
    api: Api, box: str, cloud: RealServer
) -> None:
    await api.call("context.v1.run", {"id": box, "language": "python", "code": "x = 41"})
    await api.rpc("pause", id=box)
    await api.rpc("snapshot", id=box, name="asleep")
    await api.http.delete("/v1/snapshots/asleep")
    made = await api.rpc("get", id=box)
    states = {each["id"]: each["state"] for each in await in_the_cloud(cloud)}
    assert (made["state"], states[made["about"]["cloud"]]) == ("paused", "paused"), "still"
    await api.rpc("resume", id=box)
    assert await api.sh(box, "echo on") == "on\n"
    done = await api.call("context.v1.run", {"id": box, "language": "python", "code": "x + 1"})
    assert done["results"] == [{"is_main": True, "text": "42"}]


async def test_a_snapshot_is_the_start_of_another(api: Api, box: str) -> None:
    await api.sh(box, "mkdir -p a/b && echo deep > a/b/c && ln -s b a/link")
    await api.rpc("snapshot", id=box, name="cloudy")
    again = await create(api, snapshot="cloudy")
    try:
        assert await api.sh(again["id"], "cat a/link/c") == "deep\n"
    finally:
        await api.http.delete(f"/v1/sandboxes/{again['id']}")
        await api.http.delete("/v1/snapshots/cloudy")


async def test_a_sandbox_that_the_cloud_has_killed_has_failed(
    api: Api, box: str, cloud: RealServer
) -> None:
    about = (await api.rpc("get", id=box))["about"]
    async with talking(cloud, KEY) as there:
        await there.http.delete(f"/v1/sandboxes/{about['cloud']}")

    async def failed() -> bool:
        return bool((await api.rpc("get", id=box))["state"] == "failed")

    await eventually(failed, what="the sandbox has failed", within=20)


CLOSED = "http://127.0.0.1:9"  # a port where no server listens


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        ({"E2B_API_KEY": "e2b_wrong_key"}, "forbidden", "refused the key"),
        ({"E2B_TEMPLATE": "no-such-{template}"}, "not_found", "no-such-python"),
        pytest.param(
            {"E2B_API_URL": CLOSED, "E2B_SANDBOX_URL": CLOSED},
            "unavailable",
            "cannot be reached",
            marks=pytest.mark.slow,  # the SDK tries to connect for some seconds
        ),
    ],
)
async def test_a_cloud_that_refuses(
    cloud: RealServer, more: dict[str, str], code: str, text: str
) -> None:
    with real_server(**(settings(cloud) | more)) as server:
        async with talking(server) as api:
            error = await refused(api)
            assert (error.code, text in error.message) == (code, True)
            assert "e2b_wrong_key" not in (await api.http.get("/v1/capabilities")).text
    assert "e2b_wrong_key" not in error.message


async def test_a_create_with_its_own_key(cloud: RealServer) -> None:
    bare = {name: value for name, value in settings(cloud).items() if name != "E2B_API_KEY"}
    with real_server(**bare) as server:
        async with talking(server) as api:
            error = await refused(api)
            assert (error.code, error.message) == ("invalid", "no key for E2B")
            made = await create(api, provider_key=OTHER)
            assert await api.sh(made["id"], "echo mine") == "mine\n"
            assert OTHER not in str(await api.rpc("get", id=made["id"]))
            error = await refused(api, provider_key="e2b_unknown_key")
            assert error.code == "forbidden"
            assert (await create(api, provider_key=OTHER))["state"] == "running"
            kept = written(server.base)
            await api.http.delete(f"/v1/sandboxes/{made['id']}")
    assert OTHER.encode() not in kept


def written(base: Path) -> bytes:
    """All bytes that the server has written to its data directory."""
    with sqlite3.connect(base / "data" / "capsule.db") as database:
        database.execute("PRAGMA wal_checkpoint(FULL)")
    files = [path for path in (base / "data").rglob("*") if path.is_file() and path.stat().st_size]
    return b"".join(path.read_bytes() for path in files if path.suffix in (".db", ".json", ""))


async def attach(api: Api, box: str, exec_id: str) -> dict[str, Any]:
    """All of its output, once it is over."""

    async def over() -> dict[str, Any] | None:
        found: dict[str, Any] = await api.rpc("attach", id=box, exec_id=exec_id, wait_ms=5000)
        return None if found["running"] else found

    return await eventually(over, what="the program's end", within=15) or {}


@pytest.fixture
def home() -> Iterator[dict[str, str]]:
    with server_folder("ce-", mode=0o755) as path:
        yield {"DATA_DIR": str(path / "d"), "RUN_DIR": str(path / "r")}


async def test_sandboxes_outlive_a_killed_server(cloud: RealServer, home: dict[str, str]) -> None:
    with real_server(**settings(cloud), **home, DRAIN="keep") as server:
        async with talking(server) as api:
            made = await create(api)
            mine = await create(api, provider_key=OTHER)
            started = await api.rpc("start", id=made["id"], cmd=["sh", "-c", "sleep 1; echo done"])
            server.process.kill()
            server.process.wait()
    with real_server(**settings(cloud), **home) as server:
        async with talking(server) as api:
            over = await attach(api, made["id"], started["exec_id"])
            assert (over["exit"]["exit_code"], over["stdout"]) == (0, "done\n")
            assert await api.sh(mine["id"], "echo still mine") == "still mine\n"
            for each in (made, mine):
                await api.http.delete(f"/v1/sandboxes/{each['id']}")
    ids = {each["id"] for each in await in_the_cloud(cloud)}
    assert not ids & {made["about"]["cloud"], mine["about"]["cloud"]}


async def test_a_key_that_is_refused_for_a_while_loses_no_sandbox(
    cloud: RealServer, home: dict[str, str]
) -> None:
    with real_server(**settings(cloud), **home, DRAIN="keep") as server:
        async with talking(server) as api:
            made = await create(api)
            await api.sh(made["id"], "echo kept > file")
    with real_server(
        **settings(cloud, E2B_API_KEY="e2b_wrong_key"), **home, DRAIN="keep"
    ) as server:
        async with talking(server) as api:
            assert (await api.rpc("get", id=made["id"]))["state"] == "running"
            with pytest.raises(RpcFailure) as failure:
                await api.sh(made["id"], "cat file")
            assert failure.value.code == "unavailable"
    with real_server(**settings(cloud), **home) as server:
        async with talking(server) as api:
            assert await api.sh(made["id"], "cat file") == "kept\n"
