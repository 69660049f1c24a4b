"""Connections: how many, which are closed first, and what a client that leaves ends."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from capsule.edge.server import Idle
from capsule.service import CreateRequest, Sandbox
from capsule.service.caller import OPERATOR, Caller
from tests.api.double import ServiceDouble, serving
from tests.support import eventually
from tests.support.servers import real_server

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The status of one request over a connection that stays open."""
    writer.write(HEALTH)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-le"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head.split(b" ", 2)[1]


async def test_of_too_many_idle_ones_the_longest_idle_is_closed() -> None:
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


@pytest.mark.real
def test_a_thousand_may_come_at_once(agent_binary: object) -> None:
    """The server is stopped meanwhile, so that the kernel alone takes them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1300:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    with real_server() as server, ExitStack() as stack:
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            there = ("127.0.0.1", server.port)
            callers = [
                stack.enter_context(socket.create_connection(there, timeout=10))
                for _ in range(1024)
            ]
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        for each in callers:
            each.sendall(HEALTH)
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in callers)


class Patient(ServiceDouble):
    """Whose creates wait in line."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0

    async def create(self, request: CreateRequest, caller: Caller = OPERATOR) -> Sandbox:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        raise AssertionError


CREATE = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.create", "params": {}}


@pytest.mark.parametrize(("path", "body"), [("/rpc", CREATE), ("/v1/sandboxes", {})])
async def test_a_create_whose_client_leaves_is_given_up(path: str, body: Any) -> None:
    service = Patient()
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as http:
        asking = asyncio.create_task(http.post(path, json=body))
        await eventually(lambda: service.waiting == 1, what="the create waits")
        asking.cancel()
        await asyncio.wait({asking})
        await eventually(lambda: service.waiting == 0, what="it is given up")
