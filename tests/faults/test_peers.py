"""Peers that send slowly, say nothing or vanish."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from capsule.edge import body, server
from tests.faults.calls import create, execute, finished, start
from tests.faults.machine import Machine, checked, machine, running
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(90)]

MIB = 1024 * 1024

# As long as these are, a test of them takes; the first test holds the real ones to 60 seconds.
HURRIED = {
    "capsule.edge.body:PATIENCE": 1.5,
    "capsule.edge.body:LINGER": 0.5,
    "capsule.edge.server:HEADER_PATIENCE": 1.0,
    "capsule.edge.server:WRITE_PATIENCE": 2.0,
    "capsule.edge.server:PROBES": [1, 1, 2],
}


def test_nobody_is_waited_for_longer_than_60_seconds() -> None:
    assert body.PATIENCE + body.LINGER <= 60
    assert server.HEADER_PATIENCE <= 60
    assert server.WRITE_PATIENCE <= 60
    after, again, times = server.PROBES
    assert after + again * times <= 60


@asynccontextmanager
async def hurried(nursery: Nursery) -> AsyncIterator[Machine]:
    async with machine(nursery) as host:
        host.how = {"replace": HURRIED}
        async with checked(host):
            yield host


async def descriptors_fall_to(host: Machine, count: int) -> None:
    await eventually(lambda: host.descriptors() <= count, what="they are closed", within=20)


def upload(id: str, content: bytes = b"") -> bytes:
    """The beginning of one that says to be longer."""
    path = f"/v1/sandboxes/{id}/files/workspace/file"
    head = f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n"
    return head.encode() + content


async def no_trace(http: httpx.AsyncClient, id: str) -> bool:
    return bool((await execute(http, id, "ls -A"))["stdout"] == "")


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["stalls", "drips"])
async def test_an_upload_that_makes_no_headway_is_closed_and_leaves_no_trace(
    own_nursery: Nursery, drip: bytes
) -> None:
    """A byte now and then is no headway."""
    async with hurried(own_nursery) as host, host.http() as http:
        id = await create(http)
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        writer.write(upload(id, b"" if drip else bytes(100_000)))
        answer = asyncio.create_task(reader.read())
        began = time.monotonic()
        while not answer.done():
            assert time.monotonic() - began < 20
            writer.write(drip)
            await asyncio.wait({answer}, timeout=0.1)
        assert b" 408 " in answer.result().splitlines()[0]
        writer.close()
        assert await no_trace(http, id)


async def test_an_upload_whose_sender_vanishes_leaves_no_trace(own_nursery: Nursery) -> None:
    async with running(own_nursery) as host, host.http() as http:
        id = await create(http)
        for amount in (0, 1, 70_000, 3 * MIB):
            _, writer = await asyncio.open_connection("127.0.0.1", host.port)
            writer.write(upload(id, bytes(amount)))
            await writer.drain()
            writer.transport.abort()
        await eventually(lambda: no_trace(http, id), what="no trace is left")


TCP_REPAIR = 19  # in <linux/tcp.h>: closing such a socket tells the peer nothing


async def test_peers_that_vanish_without_a_word_are_noticed(
    own_nursery: Nursery, as_root: None
) -> None:
    """As when a cable is pulled: no FIN, no RST, and the server's end stays open."""
    async with hurried(own_nursery) as host, host.http() as http:
        id = await create(http)
        exec_id = await start(http, id, "sleep 1000")
        before = host.descriptors()
        upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        upgrade += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        for path, headers in (
            ("/health", ""),
            (f"/v1/sandboxes/{id}/execs/{exec_id}/stream", ""),
            (f"/v1/sandboxes/{id}/watch", "Accept: text/event-stream\r\n"),
            (f"/terminal/{id}", upgrade),
            (f"/v1/sandboxes/{id}/exec/ws", upgrade),
        ):
            peer = socket.create_connection(("127.0.0.1", host.port))
            peer.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
            first = await asyncio.to_thread(peer.recv, 4096)
            assert first.split()[1] in (b"200", b"101"), (path, first)
            peer.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            peer.close()
        assert host.descriptors() >= before + 5
        await descriptors_fall_to(host, before)
        assert (await finished(http, id, exec_id))["running"], "the program goes on"


async def test_an_exec_whose_caller_vanishes_goes_on(own_nursery: Nursery) -> None:
    async with running(own_nursery) as host, host.http() as http:
        id = await create(http)
        for n in range(5):
            async with host.http(timeout=0.3) as hasty:
                with pytest.raises(httpx.TimeoutException):
                    await execute(hasty, id, f"sleep 1; echo {n} >> done")

        async def all_done() -> bool:
            return bool((await execute(http, id, "cat done"))["stdout"].split() == list("01234"))

        await eventually(all_done, what="all have ended")
