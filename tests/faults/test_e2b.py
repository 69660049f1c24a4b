"""E2B's SDK across a server that is killed, and clients that read slowly or leave."""

from __future__ import annotations

import asyncio
import json

import pytest
from e2b import AsyncSandbox, CommandExitException

from tests.faults.machine import Machine, running
from tests.support import eventually
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"


async def created(machine: Machine) -> AsyncSandbox:
    machine.spare += 8  # connections that the SDK keeps
    url = f"http://127.0.0.1:{machine.port}"
    return await AsyncSandbox.create(timeout=300, api_key=KEY, api_url=url, sandbox_url=url)


async def test_processes_keep_their_numbers_across_a_killed_server(own_nursery: Nursery) -> None:
    async with running(own_nursery) as machine:
        sandbox = await created(machine)
        handle = await sandbox.commands.run("read x; echo $x; exit 3", background=True, stdin=True)
        link = sandbox.download_url("/etc/hostname")
        await machine.kill()
        await machine.start()
        assert handle.pid in [each.pid for each in await sandbox.commands.list()]
        again = await sandbox.commands.connect(handle.pid)
        await sandbox.commands.send_stdin(handle.pid, "still there\n")
        with pytest.raises(CommandExitException) as ended:
            await again.wait()
        assert (ended.value.exit_code, ended.value.stdout) == (3, "still there\n")
        async with machine.http() as http:
            assert (await http.get(link)).status_code == 200
        await sandbox.kill()


async def raw_start(machine: Machine, sandbox: AsyncSandbox, script: str) -> asyncio.StreamWriter:
    """A client that has asked for a command, and reads nothing."""
    _, writer = await asyncio.open_connection("127.0.0.1", machine.port, limit=4096)
    body = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", script]}}).encode()
    body = b"\0" + len(body).to_bytes(4, "big") + body
    head = (
        "POST /process.Process/Start HTTP/1.1\r\nhost: localhost\r\n"
        f"e2b-sandbox-id: {sandbox.sandbox_id}\r\ne2b-sandbox-port: 49983\r\n"
        f"x-access-token: {sandbox._envd_access_token}\r\n"
        f"content-type: application/connect+json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


async def test_a_reader_that_stops_costs_no_memory_and_stops_its_program(
    own_nursery: Nursery,
) -> None:
    async with running(own_nursery) as machine:
        sandbox = await created(machine)
        before = machine.memory()
        note = "echo $i > /tmp/$$; mv /tmp/$$ /tmp/at"
        script = f"for i in $(seq 200); do head -c 1000000 /dev/zero; {note}; done"
        clients = [await raw_start(machine, sandbox, script) for _ in range(5)]

        looks: list[str] = []

        async def stands() -> bool:
            """For twenty looks in a row."""
            looks.append(await sandbox.files.read("/tmp/at"))
            return len(looks) >= 20 and len(set(looks[-20:])) == 1

        await eventually(lambda: sandbox.files.exists("/tmp/at"), what="output")
        await eventually(stands, what="a program that waits for its reader")
        assert int(await sandbox.files.read("/tmp/at")) < 100
        assert machine.memory() - before < 40_000_000
        assert (await sandbox.commands.run("echo others go on")).stdout == "others go on\n"
        for client in clients:
            client.transport.abort()

        async def done() -> bool:
            return await sandbox.files.read("/tmp/at") == "200\n"

        await eventually(done, what="programs that go on without readers", within=30)
        await sandbox.kill()
