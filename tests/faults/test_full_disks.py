"""No space left: for the server's records and the boxes' sockets, and inside a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.faults.calls import create, delete, execute, state
from tests.faults.machine import Machine, checked, machine, running
from tests.support import eventually
from tests.support.disks import filled
from tests.support.nursery import Nursery

pytestmark = [pytest.mark.real, pytest.mark.needs("e2fsprogs"), pytest.mark.timeout(90)]

MIB = 1024 * 1024


@asynccontextmanager
async def on_small_disk(nursery: Nursery, name: str, size: int) -> AsyncIterator[Machine]:
    """A server whose `data` or `run` directory is a file system of its own."""
    async with machine(nursery) as host:
        point = host.base / name
        point.mkdir(mode=0o711, exist_ok=True)
        options = f"size={size},mode=0711"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], check=True)
        try:
            async with checked(host):
                yield host
        finally:
            if host.pid and host.code() is None:
                await host.kill()
            subprocess.run(["umount", "-l", point], check=True)


async def outcomes(http: httpx.AsyncClient, count: int) -> list[httpx.Response]:
    calls = [http.post("/v1/sandboxes", json={"template": "bash"}) for _ in range(count)]
    return list(await asyncio.gather(*calls))


async def with_key(http: httpx.AsyncClient) -> httpx.Response:
    key = {"Idempotency-Key": "k"}
    return await http.post("/v1/sandboxes", json={"template": "bash"}, headers=key)


@pytest.mark.parametrize("leaving", [0, 4096, 40960, 49152, 65536, 400_000])
async def test_no_space_for_data(own_nursery: Nursery, as_root: None, leaving: int) -> None:
    async with on_small_disk(own_nursery, "data", 64 * MIB) as host, host.http() as http:
        old, doomed = await create(http), await create(http)
        await execute(http, old, "echo kept > file; sync")
        with filled(host.base / "data", leaving):
            for answer in await outcomes(http, 10):
                assert answer.status_code in (201, 503, 507), answer.text
                if answer.status_code == 507:
                    assert answer.json()["error"]["code"] == "no_space"
            for answer in [await with_key(http) for _ in range(2)]:
                assert answer.status_code in (201, 503, 507), answer.text
            assert await host.health() == 200
            assert (await execute(http, old, "cat file"))["stdout"] == "kept\n"
            flood = await execute(http, old, "head -c 3000000 /dev/zero | tr '\\0' x")
            assert (flood["reason"], flood["stdout_bytes"]) == ("exited", 3_000_000)
            assert set(flood["stdout"]) == {"x"}
            assert flood["stdout_truncated"] == (len(flood["stdout"]) < 3_000_000)
            assert await delete(http, doomed) == 200
        await delete(http, await create(http))

        async def key_works() -> bool:
            answer = await with_key(http)
            assert answer.status_code in (201, 503), answer.text
            return answer.status_code == 201

        await eventually(key_works, what="the key can be used", within=15)
        assert (await execute(http, old, "cat file"))["stdout"] == "kept\n"
        await host.kill()
        await host.start()
        assert (await execute(http, old, "cat file"))["stdout"] == "kept\n"


async def test_a_terminal_while_there_is_no_space_for_data(
    own_nursery: Nursery, as_root: None
) -> None:
    """What it keeps of its screen has no place any more; the shell goes on."""
    async with on_small_disk(own_nursery, "data", 64 * MIB) as host, host.http() as http:
        id = await create(http)
        url = f"ws://127.0.0.1:{host.port}/terminal/{id}"
        async with connect(url, proxy=None) as viewer:
            await says(viewer, "echo be-$((1 + 1))-gin\n", "be-2-gin")
            with filled(host.base / "data"):
                await says(viewer, "seq 200000; echo en-$((1 + 1))-d\n", "en-2-d")
                await says(viewer, "seq 200000 >&2; echo en-$((2 + 2))-d\n", "en-4-d")
                async with connect(url, proxy=None) as other:
                    await says(other, "echo bo-$((3 + 3))-th\n", "bo-6-th")
            await says(viewer, "seq 300000; echo en-$((4 + 4))-d\n", "en-8-d")
        keeper = int(host.record(id)["keeper"])
        before = cpu_seconds(keeper)
        for _ in range(20):
            assert (await execute(http, id, "sleep 0.05; echo fine"))["stdout"] == "fine\n"
        assert cpu_seconds(keeper) - before < 0.9, "it does not run in circles"


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def says(viewer: ClientConnection, text: str, wanted: str) -> None:
    await viewer.send(text)
    heard = ""
    async with asyncio.timeout(15):
        while wanted not in heard:
            heard = heard[-100:] + str(await viewer.recv())


async def test_no_space_for_data_at_the_start(own_nursery: Nursery, as_root: None) -> None:
    async with on_small_disk(own_nursery, "data", 64 * MIB) as host:
        async with host.http() as http:
            id = await create(http)
        await host.kill()
        with filled(host.base / "data"):
            host.spawn()
            with contextlib.suppress(pytest.fail.Exception, AssertionError):
                await eventually(lambda: host.code() is not None, what="it gives up", within=3)
            if host.code() is not None:
                assert host.code() == 1
                assert "no space" in host.log().lower()
                assert "Traceback" not in host.log()
            else:
                await host.answering()
                await host.kill()
        await host.start()
        assert await host.listed() == {id: "running"}


@pytest.mark.parametrize("leaving", [0, 4096])
async def test_no_space_for_sockets_and_box_records(
    own_nursery: Nursery, as_root: None, leaving: int
) -> None:
    async with on_small_disk(own_nursery, "run", 8 * MIB) as host, host.http() as http:
        old, doomed = await create(http), await create(http)
        with filled(host.base / "run", leaving):
            for answer in await outcomes(http, 10):
                assert answer.status_code in (201, 503, 507), answer.text
            assert (await execute(http, old, "echo fine"))["stdout"] == "fine\n"
            assert await delete(http, doomed) == 200
            assert await host.health() == 200
        await delete(http, await create(http))


async def upload(http: httpx.AsyncClient, id: str, name: str, size: int) -> httpx.Response:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size // 65536):
            yield bytes(65536)

    return await http.put(f"/v1/sandboxes/{id}/files/workspace/{name}", content=pieces())


@pytest.mark.parametrize("backing", ["auto", "memory"])
async def test_no_space_inside_a_sandbox(own_nursery: Nursery, backing: str) -> None:
    async with running(own_nursery, DISK_BACKING=backing) as host, host.http() as http:
        id = await create(http, limits={"disk": 20 * MIB, "memory": 128 * MIB})
        other = await create(http)
        # Two files: one alone may not be larger than the disk, and ends its writer.
        full = await execute(http, id, "for f in a b; do head -c 15000000 /dev/zero > $f; done")
        assert "No space left" in full["stderr"]
        answer = await upload(http, id, "more", 4 * MIB)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "no_space")
        names = (await execute(http, id, "ls -A"))["stdout"]
        assert names == "a\nb\n", "what could not be written leaves nothing"
        assert (await execute(http, other, "head -c 1000000 /dev/zero > f"))["exit_code"] == 0
        await execute(http, id, "rm a")
        assert (await upload(http, id, "more", 4 * MIB)).status_code == 200
        assert (await state(http, id))["state"] == "running"


async def test_a_sandbox_whose_disk_the_host_cannot_back_harms_only_itself(
    own_nursery: Nursery, as_root: None
) -> None:
    """Disks are sparse: the host may be full when a sandbox still has room of its own."""
    async with on_small_disk(own_nursery, "data", 64 * MIB) as host, host.http() as http:
        id, other = await create(http), await create(http)
        await execute(http, other, "echo kept > file; sync")
        with filled(host.base / "data"):
            wrote = await execute(http, id, "head -c 30000000 /dev/zero > big && sync big")
            assert (await execute(http, other, "cat file"))["stdout"] == "kept\n"
            assert await host.health() == 200
        assert wrote["exit_code"] != 0, "lost data is not a success"
        assert (await execute(http, other, "echo more >> file; cat file"))[
            "stdout"
        ] == "kept\nmore\n"
        assert await delete(http, id) == 200


SIZED = {"name": "v", "size": 32 * MIB}
MOUNT = {"name": "v", "path": "/workspace/v"}


async def test_what_a_sized_volume_took_is_kept_on_a_full_disk(
    own_nursery: Nursery, as_root: None
) -> None:
    async with on_small_disk(own_nursery, "data", 128 * MIB) as host, host.http() as http:
        assert (await http.post("/v1/volumes", json=SIZED)).status_code == 201
        id = await create(http, volumes=[MOUNT])
        with filled(host.base / "data", leaving=4 * MIB):
            write = "head -c 20M /dev/urandom > v/f && md5sum < v/f > v/sum && sync v/f v/sum"
            assert (await execute(http, id, write))["exit_code"] == 0
            other = await create(http, volumes=[MOUNT])
            assert (await execute(http, other, "touch v/new"))["exit_code"] == 0
            for each in (id, other):
                assert await delete(http, each) == 200
        again = await create(http, volumes=[MOUNT])
        look = "md5sum < v/f | cmp - v/sum && ls v"
        assert (await execute(http, again, look))["stdout"] == "f\nnew\nsum\n"
        await delete(http, again)


async def test_a_volume_that_the_disk_has_no_room_for_is_refused(
    own_nursery: Nursery, as_root: None
) -> None:
    async with on_small_disk(own_nursery, "data", 64 * MIB) as host, host.http() as http:
        answer = await http.post("/v1/volumes", json={"name": "v", "size": 512 * MIB})
        assert answer.status_code == 507, answer.text
        error = answer.json()["error"]
        assert error["details"]["size"] == 512 * MIB
        assert error["details"]["limit"] < error["details"]["free"] <= 64 * MIB
        assert "smaller" in error["hint"]
        assert (await http.get("/v1/volumes")).json()["volumes"] == []
        assert os.listdir(host.base / "data" / "volumes") == []
        assert (await http.post("/v1/volumes", json={"name": "v", "size": 16 * MIB})).is_success
