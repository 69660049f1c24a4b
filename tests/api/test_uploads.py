"""Neither large files nor slow readers cost the server memory, or others their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.api.client import Api
from tests.support.servers import RealServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(60)]

MIB = 1024 * 1024
SIZE = 100 * MIB
GROWTH = 24 * MIB  # beyond what the server had; a copy of the file would be four times that


def memory_of(server: RealServer) -> int:
    """Resident bytes of the server's process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@asynccontextmanager
async def constant_memory(server: RealServer) -> AsyncIterator[None]:
    before = most = memory_of(server)

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, await asyncio.to_thread(memory_of, server))
            await asyncio.sleep(0.01)  # between samples

    watching = asyncio.create_task(watch())
    yield
    watching.cancel()
    assert most - before < GROWTH


async def test_four_large_uploads_at_once(server: RealServer, api: Api, box: str) -> None:
    async def content() -> AsyncIterator[bytes]:
        block = bytes(range(256)) * 1024
        for _ in range(SIZE // len(block)):
            yield block

    async def upload(name: str) -> None:
        url = f"/v1/sandboxes/{box}/files/workspace/{name}"
        assert (await api.http.put(url, content=content())).status_code == 200

    async with constant_memory(server):
        uploads = asyncio.gather(*(upload(name) for name in "abcd"))
        others = 0
        while not uploads.done():
            assert (await api.http.get("/health")).status_code == 200
            others += 1
        await uploads


@pytest.mark.parametrize("what", ["file", "output"])
async def test_a_client_that_does_not_read_is_not_buffered_for(
    server: RealServer, api: Api, box: str, what: str
) -> None:
    if what == "file":
        await api.sh(box, "truncate -s 300M hole")
        path = f"/v1/sandboxes/{box}/files/workspace/hole"
    else:
        flood = {"output_limit": 64 * MIB, "timeout_ms": 15_000}
        started = await api.rpc("start", id=box, cmd="yes", **flood)
        path = f"/v1/sandboxes/{box}/execs/{started['exec_id']}/stream"
    async with constant_memory(server):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b" 200 " in await reader.readline()
        for _ in range(20):
            assert (await api.rpc("exec", id=box, cmd=["true"]))["exit_code"] == 0
        writer.transport.abort()
