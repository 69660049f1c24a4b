"""Many connections: nobody is turned away at the door, and those that only wait make room."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from capsule.app import bind
from capsule.config import Config
from capsule.edge.drain import Gate, cut
from capsule.edge.server import KEEP_ALIVE, Idle, Server
from tests.api.double import serving
from tests.support.servers import RealServer, real_server

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The status of one request over a connection that stays open; nothing: it is closed."""
    writer.write(HEALTH)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-le"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head.split(b" ", 2)[1]


def test_clients_close_first() -> None:
    """E2B's keep a connection for 300 seconds, load balancers for 600."""
    assert KEEP_ALIVE >= 620


async def test_of_too_many_that_wait_the_longest_is_closed() -> None:
    async with serving() as running:
        running.server.config.idle = Idle(2)
        ends = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(3)]
        first, second, third = ends
        for each in (first, second, first, third):  # so that the second has waited longest
            assert await asked(*each) == b"200"
        assert await second[0].read() == b""
        for each in (first, third):
            assert await asked(*each) == b"200"
        for _, writer in ends:
            writer.close()


async def test_one_that_is_answered_is_not_idle() -> None:
    async with serving() as running:
        running.server.config.idle = Idle(1)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(HEALTH * 3)  # one after the other, without waiting
        for _ in range(3):
            await reader.readuntil(b"\r\n\r\n")
            assert (await reader.readexactly(15)).startswith(b'{"status"')
        writer.close()


@pytest.mark.parametrize("takes", [True, False])
async def test_what_was_sent_before_a_cut_arrives(
    takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who does not take it is not waited for."""
    monkeypatch.setattr("capsule.edge.server.CUT_PATIENCE", 10.0 if takes else 0.1)
    large, over = bytes(16 << 20), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": large, "more_body": True})
        await cut(scope)
        over.set()

    config = await asyncio.to_thread(Config, port=0)
    server = Server(config, app, Gate(), on_drain=lambda _: None)
    with bind(config) as listener:
        listener.listen()
        async with asyncio.TaskGroup() as group, asyncio.timeout(15):
            group.create_task(server.serve(sockets=[listener]))
            port = listener.getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEALTH)
            if not takes:
                await over.wait()
            got = await reader.read()
            assert (len(got) > len(large)) is takes
            assert not got.endswith(b"0\r\n\r\n")  # it does not look like the end
            writer.close()
            server.should_exit = True


@pytest.mark.real
def test_a_thousand_may_come_at_once(agent_binary: object) -> None:
    """The server is stopped meanwhile, so that the kernel alone takes them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1300:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    with real_server() as server, ExitStack() as stack:
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            callers = [stack.enter_context(called(server)) for _ in range(1024)]
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        for each in callers:
            each.sendall(HEALTH)
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in callers)


def called(server: RealServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)
