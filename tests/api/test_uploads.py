"""Files of any size go through the server in constant memory, both ways."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.client import Api
from tests.support.servers import RealServer

pytestmark = [pytest.mark.real, pytest.mark.slow]

MIB = 1024 * 1024
SIZE = 100 * MIB
GROWTH = (
    24 * MIB
)  # what the server may need beyond what it had; a copy of the file would be four times that


def memory_of(server: RealServer) -> int:
    """Resident bytes of the server's process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most memory a server had while something was going on."""

    def __init__(self, server: RealServer) -> None:
        self._server = server
        self.before = self.most = memory_of(server)

    async def __aenter__(self) -> Peak:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            self.most = max(self.most, await asyncio.to_thread(memory_of, self._server))
            await asyncio.sleep(0.01)

    @property
    def growth(self) -> int:
        return self.most - self.before


async def content() -> AsyncIterator[bytes]:
    block = bytes(range(256)) * 1024
    for _ in range(SIZE // len(block)):
        yield block


async def digest_of(parts: AsyncIterator[bytes]) -> str:
    digest = hashlib.sha256()
    async for part in parts:
        digest.update(part)
    return digest.hexdigest()


async def test_a_large_file_up_and_down_in_constant_memory(
    server: RealServer, api: Api, box: str
) -> None:
    url = f"/v1/sandboxes/{box}/files/workspace/big"
    headers = {"Content-Length": str(SIZE)}
    async with Peak(server) as peak:
        written = await api.http.put(url, content=content(), headers=headers)
        assert written.json()["size"] == SIZE
        async with api.http.stream("GET", url) as answer:
            assert answer.headers["content-length"] == str(SIZE)
            down = await digest_of(answer.aiter_bytes())
    assert down == await digest_of(content())
    assert peak.growth < GROWTH


async def test_four_large_uploads_at_once_leave_others_their_turn(
    server: RealServer, api: Api, box: str
) -> None:
    waits: list[float] = []

    async def poke() -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await api.http.get("/health")
            waits.append(loop.time() - before)

    async def upload(name: str) -> None:
        url = f"/v1/sandboxes/{box}/files/workspace/{name}"
        assert (await api.http.put(url, content=content())).status_code == 200

    async with Peak(server) as peak:
        poking = asyncio.create_task(poke())
        await asyncio.gather(*(upload(name) for name in "abcd"))
        poking.cancel()
    assert max(waits) < 1.0
    assert peak.growth < GROWTH


async def test_a_client_that_does_not_read_is_not_buffered_for(
    server: RealServer, api: Api, box: str
) -> None:
    await api.sh(box, "truncate -s 300M hole")
    path = f"/v1/sandboxes/{box}/files/workspace/hole"
    async with Peak(server) as peak:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b" 200 " in await reader.readline()
        for _ in range(20):
            assert (await api.http.get("/health")).status_code == 200
        writer.transport.abort()
    assert peak.growth < GROWTH


async def test_a_flood_of_output_is_not_buffered_for_a_slow_reader(
    server: RealServer, api: Api, box: str
) -> None:
    started = await api.rpc("start", id=box, cmd="yes", output_limit=64 * MIB, timeout_ms=15_000)
    path = f"/v1/sandboxes/{box}/execs/{started['exec_id']}/stream"
    async with Peak(server) as peak:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b" 200 " in await reader.readline()
        for _ in range(20):
            assert (await api.rpc("exec", id=box, cmd=["true"]))["exit_code"] == 0
        writer.transport.abort()
    await api.rpc("kill", id=box, exec_id=started["exec_id"])
    assert peak.growth < GROWTH
