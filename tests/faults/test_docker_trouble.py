"""The Engine refuses, hangs, fails and hangs up, under a server that runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.faults.calls import attempt, create, execute, refused
from tests.faults.containers import SOONER, TRANSPORTS, DockerMachine, unstarted
from tests.faults.daemon import Daemon
from tests.faults.machine import checked
from tests.faults.proxy import Mode, Proxy
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(90)]

DOCKER = {"template": "shell", "provider": "docker"}


@asynccontextmanager
async def proxied(
    nursery: Nursery, docker: Daemon, replace: dict[str, float] | None = None, **settings: str
) -> AsyncIterator[tuple[DockerMachine, Proxy]]:
    """A server with both providers; the local one is its default."""
    async with unstarted(nursery, docker, PROVIDER="local", **settings) as host:
        async with Proxy(host.base / "engine.sock", docker.folder / "docker.sock") as proxy:
            host.env["CAPSULE_DOCKER_HOST"] = proxy.url
            host.how = {"replace": {**SOONER, **(replace or {})}}
            async with checked(host):
                yield host, proxy


async def neighbour(http: httpx.AsyncClient, id: str, until: asyncio.Event) -> float:
    """Uses a local sandbox all the time; how long it had to wait at most."""
    longest = 0.0
    while not until.is_set():
        began = time.monotonic()
        assert (await execute(http, id, "echo fine"))["stdout"] == "fine\n"
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0.05)  # one who works there, and no load
    return longest


@asynccontextmanager
async def unaffected(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """The local provider, by what the block does to the other one."""
    local, over = await create(http), asyncio.Event()
    using = asyncio.create_task(neighbour(http, local, over))
    yield
    created = await create(http)
    assert (await http.delete(f"/v1/sandboxes/{created}")).status_code == 200
    over.set()
    assert await using < 3.0


def make(http: httpx.AsyncClient) -> Awaitable[httpx.Response]:
    return http.post("/v1/sandboxes", json=DOCKER)


QUICK_FAULTS = ["refuse", Mode.ERROR, Mode.CUT]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_engine_in_trouble_is_unavailable_at_once(
    own_nursery: Nursery, docker: Daemon, transport: str
) -> None:
    async with (
        proxied(own_nursery, docker, DOCKER_TRANSPORT=transport) as (host, proxy),
        host.http() as http,
    ):
        kept, *others = await asyncio.gather(*(create(http, **DOCKER) for _ in range(4)))
        for fault, ended in zip(QUICK_FAULTS, others, strict=True):
            async with unaffected(http):
                await proxy.refuse() if fault == "refuse" else proxy.set(Mode(fault))
                await refusing(http, ended, within=5.0)
                if transport == "socket" or fault == Mode.ERROR:  # a stream that there is goes on
                    assert (await execute(http, kept, "echo fine"))["stdout"] == "fine\n"
                else:
                    await refused(attempt(http, kept, "true"), within=5.0)
            await proxy.listen() if fault == "refuse" else proxy.set(Mode.PASS)
            await recovered(host, http, kept, ended)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_engine_that_hangs_is_unavailable_in_seconds(
    own_nursery: Nursery, docker: Daemon, transport: str
) -> None:
    """Not after what an Engine gets that is merely busy."""
    async with (
        proxied(own_nursery, docker, DOCKER_TRANSPORT=transport) as (host, proxy),
        host.http() as http,
    ):
        kept, ended = await asyncio.gather(create(http, **DOCKER), create(http, **DOCKER))
        async with unaffected(http):
            proxy.set(Mode.HANG)
            await refusing(http, ended, within=10.0)
            if transport == "socket":
                assert (await execute(http, kept, "echo fine"))["stdout"] == "fine\n"
        proxy.set(Mode.PASS)
        await recovered(host, http, kept, ended)


async def refusing(http: httpx.AsyncClient, ended: str, *, within: float) -> None:
    errors = await asyncio.gather(
        refused(make(http), within=within),
        refused(http.delete(f"/v1/sandboxes/{ended}"), within=within),
    )
    assert all("Docker Engine" in error["message"] for error in errors)


async def recovered(host: DockerMachine, http: httpx.AsyncClient, kept: str, ended: str) -> None:
    await host.agree(within=20)
    listed = await host.listed()
    assert listed[kept] == "running"
    assert ended not in listed, "the delete was carried out in the end"
    assert (await execute(http, kept, "echo fine"))["stdout"] == "fine\n"


async def test_a_stream_that_hangs_is_given_up_and_its_box_is_not(
    own_nursery: Nursery, docker: Daemon
) -> None:
    """An Engine that does not answer for longer than an agent may be silent costs no sandbox."""
    impatient = {"capsule.service.pulse:SILENCE": 2.0, "capsule.service.pulse:BUDGET": 0.5}
    async with (
        proxied(own_nursery, docker, impatient, DOCKER_TRANSPORT="engine") as (host, proxy),
        host.http(timeout=60) as http,
    ):
        id = await create(http, **DOCKER)
        proxy.set(Mode.HANG)
        error = await refused(attempt(http, id, "true"), within=20)
        assert "Docker Engine" in error["message"]
        assert (await host.listed())[id] == "running"
        proxy.set(Mode.PASS)
        assert (await execute(http, id, "echo fine"))["stdout"] == "fine\n"


async def test_a_create_that_came_after_it_was_given_up_is_reaped(
    own_nursery: Nursery, docker: Daemon
) -> None:
    hasty = {"capsule.providers.docker.engine:SLOW": 2.0, "capsule.service.reaper:TIDY_EVERY": 1.0}
    async with (
        proxied(own_nursery, docker, hasty) as (host, proxy),
        host.http() as http,
    ):
        kept = await create(http, **DOCKER)
        proxy.held = "POST .*/containers/create"
        error = await refused(make(http), within=9)
        assert "did not answer within 2 seconds (create)" in error["message"]
        assert proxy.holding == 1
        await host.agree()
        proxy.release()
        await eventually(lambda: proxy.carried_out, what="the Engine has made it")
        await host.agree()
        assert await host.listed() == {kept: "running"}
        proxy.held = None
