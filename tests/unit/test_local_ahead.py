"""The next box's disk and network are made ahead: one box's alone, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.link.link import AgentLink
from capsule.model import (
    MIB,
    ExecId,
    ExecRequest,
    Isolation,
    Limits,
    SandboxId,
    SandboxSpec,
    Template,
)
from capsule.providers.contract import Box
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from tests.support import eventually
from tests.support.folders import server_folder

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("as_root")]

SPEC = SandboxSpec(Template("test", needs=("sh",)), Limits(disk=64 * MIB, inodes=2000))
NS_GET_USERNS = 0xB701  # <linux/nsfs.h>
LARGER = replace(SPEC, limits=replace(SPEC.limits, disk=96 * MIB))


@pytest.fixture
def folder() -> Iterator[Path]:
    with server_folder("cap-", data="data") as path:
        yield path


@pytest.fixture
async def provider(folder: Path, agent_binary: Path) -> AsyncIterator[LocalProvider]:
    settings = LocalSettings(
        folder / "data", folder / "run", agent_binary, isolation=Isolation.NAMESPACES
    )
    made = LocalProvider(settings)
    await made.open()
    yield made
    async for handle in made.owned():
        await made.discard(handle)
    await made.aclose()


def devices(folder: Path) -> set[str]:
    """The loop devices of disks below this folder, by number."""
    found = set()
    for device in Path("/sys/block").glob("loop*"):
        with contextlib.suppress(OSError):
            if (device / "loop/backing_file").read_text().startswith(f"{folder}/data/disks/"):
                found.add((device / "dev").read_text().strip())
    return found


async def has(folder: Path, count: int) -> set[str]:
    await eventually(lambda: len(devices(folder)) == count, what=f"{count} disks")
    return devices(folder)


def owner_of(network: str) -> str:
    """The user namespace whose capabilities count in this network namespace."""
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == network:
                with open(link) as namespace:
                    owner = fcntl.ioctl(namespace, NS_GET_USERNS)
                try:
                    return f"user:[{os.fstat(owner).st_ino}]"
                finally:
                    os.close(owner)
    raise AssertionError(f"nobody is in {network}")


async def launch(provider: LocalProvider, name: str, spec: SandboxSpec = SPEC) -> Box:
    return await provider.launch(SandboxId(name), spec)


async def sh(box: Box, script: str) -> str:
    id = ExecId(secrets.token_hex(4))
    request = ExecRequest(("/bin/sh", "-c", script), id, timeout=15.0)
    exit, stdout, stderr, _ = await AgentLink(box.connect).collect(request)
    assert exit.exit_code == 0, stderr
    return stdout.decode().strip()


async def device_of(box: Box) -> str:
    return await sh(box, "stat -c %Hd:%Ld /workspace")


async def made_ahead(provider: LocalProvider, folder: Path) -> str:
    """After two boxes of a kind, `one` and `two`: the device of the disk that waits for a third."""
    boxes = [await launch(provider, "one"), await launch(provider, "two")]
    theirs = {await device_of(box) for box in boxes}
    (ahead,) = await has(folder, 3) - theirs
    return ahead


async def test_each_of_its_own_kind_makes_none(provider: LocalProvider, folder: Path) -> None:
    for step, name in enumerate(("one", "two", "three")):
        limits = replace(SPEC.limits, disk=(64 + 8 * step) * MIB)
        await launch(provider, name, replace(SPEC, limits=limits))
    await asyncio.sleep(0.1)  # in which one would be made
    assert len(devices(folder)) == 3


async def test_the_third_of_a_kind_takes_it(provider: LocalProvider, folder: Path) -> None:
    ahead = await made_ahead(provider, folder)
    box = await launch(provider, "three")
    assert await device_of(box) == ahead
    assert await sh(box, "ls -A /workspace /tmp; echo x > file; cat file") == (
        "/tmp:\n\n/workspace:\nx"
    )
    await has(folder, 4)  # and there is one for the fourth


async def test_each_has_a_network_of_its_own(provider: LocalProvider, folder: Path) -> None:
    """The third's was made ahead. It is no box's to change, not even for its pid 1."""
    await made_ahead(provider, folder)
    boxes = [await launch(provider, name) for name in ("three", "four")]
    networks = [await sh(box, "readlink /proc/self/ns/net") for box in boxes]
    assert len({*networks, os.readlink("/proc/self/ns/net")}) == 3
    for box in boxes:
        assert "127.0.0.1" in await sh(box, "cat /proc/net/fib_trie")  # lo is up
    own = await sh(boxes[0], "readlink /proc/self/ns/user")
    assert owner_of(networks[0]) != own


async def test_another_kind_gets_its_own(provider: LocalProvider, folder: Path) -> None:
    await made_ahead(provider, folder)
    box = await launch(provider, "larger", LARGER)
    assert int(await sh(box, "df -m --output=size /workspace | tail -1")) > 80
    await has(folder, 3)  # the one that did not fit is gone


async def test_it_goes_with_the_server(provider: LocalProvider, folder: Path) -> None:
    ahead = await made_ahead(provider, folder)
    await provider.aclose()
    assert ahead not in await has(folder, 2)


async def test_a_box_launched_after_a_rush_is_fine(provider: LocalProvider, folder: Path) -> None:
    boxes = await asyncio.gather(*(launch(provider, f"b{n}") for n in range(12)))
    assert len({await device_of(box) for box in boxes}) == 12
    await has(folder, 13)
    for box in boxes:
        await box.destroy()
    await has(folder, 1)


async def test_a_disk_with_much_on_it_is_gone_with_the_answer(
    provider: LocalProvider, folder: Path
) -> None:
    box = await launch(provider, "one")
    await sh(box, "head -c 30000000 /dev/zero > big")
    assert len(devices(folder)) == 1
    await box.destroy()
    assert devices(folder) == set()
