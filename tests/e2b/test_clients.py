"""E2B's asynchronous SDK: each part of it works. What each call does is in the other modules."""

from __future__ import annotations

import asyncio
import json
import secrets

import pytest
from e2b import (
    E2B,
    AsyncSandbox,
    AsyncSecret,
    AsyncVolume,
    CommandExitException,
    PtySize,
    SandboxNotFoundException,
    TimeoutException,
)
from e2b.exceptions import VolumePathNotFoundException
from e2b_code_interpreter import AsyncSandbox as AsyncInterpreter

from tests.e2b.conftest import parameters
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


async def test_lifecycle_and_state(async_sandbox: AsyncSandbox, e2b: E2B) -> None:
    assert await async_sandbox.is_running()
    again = await e2b.AsyncSandbox.connect(async_sandbox.sandbox_id)
    assert (await again.get_info()).sandbox_id == async_sandbox.sandbox_id
    with pytest.raises(SandboxNotFoundException):
        await e2b.AsyncSandbox.connect("abcdefghijklmnop")
    made = await async_sandbox.create_snapshot()
    found = await e2b.AsyncSandbox.list_snapshots(async_sandbox.sandbox_id).next_items()
    assert [each.snapshot_id for each in found] == [made.snapshot_id]
    assert await e2b.AsyncSandbox.delete_snapshot(made.snapshot_id)
    assert len(await async_sandbox.get_metrics()) >= 1
    forks = await async_sandbox.fork(timeout=60)
    assert isinstance(forks[0], AsyncSandbox) and await forks[0].kill()
    assert await async_sandbox.pause() is True
    await async_sandbox.connect()
    await async_sandbox.update_network({"deny_out": ["0.0.0.0/0"]})
    many = await asyncio.gather(*(e2b.AsyncSandbox.create() for _ in range(5)))
    assert len({each.sandbox_id for each in many}) == 5
    assert all(await asyncio.gather(*(each.kill() for each in many)))


async def test_commands(async_sandbox: AsyncSandbox) -> None:
    commands = async_sandbox.commands
    assert (await commands.run("echo hi")).stdout == "hi\n"
    seen: list[str] = []
    handle = await commands.run("cat", background=True, stdin=True, on_stdout=seen.append)
    assert handle.pid in [each.pid for each in await commands.list()]
    await handle.send_stdin("a\n")
    await commands.send_stdin(handle.pid, "b\n")
    await commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "a\nb\n" == "".join(seen)
    sleeper = await commands.run("sleep 60", background=True)
    again = await commands.connect(sleeper.pid)
    assert await commands.kill(sleeper.pid)
    with pytest.raises(CommandExitException):
        await again.wait()
    with pytest.raises(TimeoutException):
        await commands.run("sleep 60", timeout=0.3)


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_two_hundred_commands_run_at_once(async_sandbox: AsyncSandbox) -> None:
    """As many as one client has connections for; the last one asks about the others."""
    count = 199
    await async_sandbox.commands.run("mkfifo /tmp/gate")
    waiting = [
        asyncio.ensure_future(
            async_sandbox.commands.run(
                f"touch /tmp/at-{n}; until [ -e /tmp/go ]; do read -t 1 <>/tmp/gate; done; echo {n}"
            )
        )
        for n in range(count)
    ]
    there = f"[ $(ls -d /tmp/at-* | wc -l) -eq {count} ]"
    await async_sandbox.commands.run(f"until {there}; do sleep 0.1; done; touch /tmp/go")
    done = await asyncio.gather(*waiting)
    assert [each.stdout for each in done] == [f"{n}\n" for n in range(count)]


async def test_terminals(async_sandbox: AsyncSandbox) -> None:
    shown: list[bytes] = []
    done = asyncio.Event()

    def show(data: bytes) -> None:
        shown.append(data)
        if b"is 42" in b"".join(shown):
            done.set()

    handle = await async_sandbox.pty.create(PtySize(rows=24, cols=80), on_data=show)
    await async_sandbox.pty.send_stdin(handle.pid, b"echo is $((20 + 22))\n")
    await asyncio.wait_for(done.wait(), 10)
    await async_sandbox.pty.resize(handle.pid, PtySize(rows=10, cols=20))
    assert await async_sandbox.pty.kill(handle.pid)


async def test_files(async_sandbox: AsyncSandbox) -> None:
    files = async_sandbox.files
    await files.write("a/b.txt", "text")
    assert await files.read("a/b.txt") == "text"
    assert [e.name for e in await files.list("a")] == ["b.txt"]
    assert await files.make_dir("a/c") and await files.exists("a/c")
    assert (await files.rename("a/b.txt", "a/c/d.txt")).name == "d.txt"
    assert (await files.get_info("a/c/d.txt")).size == 4
    written = await files.write_files([{"path": f"m{n}", "data": str(n)} for n in range(5)])
    assert [each.name for each in written] == [f"m{n}" for n in range(5)]
    async with await files.read("a/c/d.txt", format="stream") as stream:
        assert b"".join([piece async for piece in stream]) == b"text"
    await files.remove("a")
    assert not await files.exists("a")


async def test_code(place: RealServer) -> None:
    sandbox = await AsyncInterpreter.create(timeout=120, **parameters(place))
    lines: list[str] = []
    begun = asyncio.Event()

    async def hear(message: object) -> None:
        lines.append(str(message))
        begun.set()

    ran = await sandbox.run_code("print('hi')\n6 * 7", on_stdout=hear)
    assert (ran.text, lines) == ("42", ["hi\n"])
    context = await sandbox.create_code_context(cwd="/tmp")
    assert (await sandbox.run_code("import os; os.getcwd()", context=context)).text == "/tmp"
    assert context.id in [each.id for each in await sandbox.list_code_contexts()]
    await sandbox.restart_code_context(context.id)
    await sandbox.remove_code_context(context.id)
    await sandbox.run_code("import time; order = []")
    code = "order.append({n}); time.sleep(0.05); order.append({n})"
    await asyncio.gather(*(sandbox.run_code(code.format(n=n)) for n in range(4)))
    order = json.loads((await sandbox.run_code("order")).text or "")
    assert order[::2] == order[1::2] and sorted(order[::2]) == [0, 1, 2, 3], "one after the other"
    begun.clear()
    running = asyncio.create_task(sandbox.run_code("print(1); time.sleep(60)", on_stdout=hear))
    await begun.wait()
    await sandbox.kill()
    with pytest.raises(TimeoutException, match="was killed while the request was in progress"):
        await running


async def test_volumes(e2b_env: RealServer) -> None:
    volume = await AsyncVolume.create(f"v-{secrets.token_hex(4)}")
    await volume.make_dir("/a/b", force=True)
    entry = await volume.write_file("/a/b/c.txt", "content", mode=0o640)
    assert entry.mode == 0o640
    assert await volume.read_file("/a/b/c.txt") == "content"
    stream = await volume.read_file("/a/b/c.txt", format="stream")
    assert b"".join([piece async for piece in stream]) == b"content"
    assert [each.name for each in await volume.list("/a")] == ["b"]
    assert (await volume.update_metadata("/a/b/c.txt", mode=0o600)).mode == 0o600
    await volume.remove("/a")
    assert await volume.exists("/a") is False
    with pytest.raises(VolumePathNotFoundException):
        await volume.get_info("/a")
    assert volume.volume_id in [each.volume_id for each in await AsyncVolume.list()]
    assert await AsyncVolume.destroy(volume.volume_id)


async def test_secrets(e2b_env: RealServer) -> None:
    name = f"s-{secrets.token_hex(4)}"
    made = await AsyncSecret.create(name, "value")
    assert (await AsyncSecret.update(name, "x")).version == 2
    assert (await AsyncSecret.get_info(made.secret_id)).name == name
    assert name in [each.name for each in await AsyncSecret.list().next_items()]
    assert await AsyncSecret.destroy(name) is True
    assert await AsyncSecret.exists(name) is False
