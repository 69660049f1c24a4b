"""Boxes of the local provider on this host: what the contract suite does not know of.

Its launcher and keepers, its records, its roots, and what it shows of the host.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import CapsuleError, UnavailableError
from capsule.host_errors import host_errors
from capsule.link.link import AgentLink
from capsule.model import (
    MIB,
    ExecId,
    ExecRequest,
    Exit,
    Handle,
    Isolation,
    Limits,
    SandboxId,
    SandboxSpec,
    Template,
)
from capsule.providers.contract import Box
from capsule.providers.local import cgroups
from capsule.providers.local.cgroups import Cgroups
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from tests.support import alive, eventually
from tests.support.folders import server_folder

pytestmark = pytest.mark.real

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/workspace", "LANG": "C.UTF-8"}
SPEC = SandboxSpec(Template("test", needs=("sh",)), Limits(disk=64 * MIB, inodes=2000))


@pytest.fixture
def dirs() -> Iterator[Path]:
    """Folders that other users can pass through, as pytest's own do not allow."""
    with server_folder("cap-", data="data") as path:
        yield path


async def opened(dirs: Path, agent: Path, level: Isolation) -> LocalProvider:
    provider = LocalProvider(LocalSettings(dirs / "data", dirs / "run", agent, isolation=level))
    try:
        await provider.open()
    except UnavailableError as exc:
        await provider.aclose()
        pytest.skip(f"this host cannot: {exc.message}")
    return provider


async def close(provider: LocalProvider) -> None:
    """Removes what a test left, even one that failed."""
    async for handle in provider.owned():
        await provider.discard(handle)
    await provider.aclose()


LANDLOCK = pytest.param(Isolation.LANDLOCK, marks=pytest.mark.needs("landlock"))


@pytest.fixture(params=[Isolation.NAMESPACES, LANDLOCK])
async def provider(
    request: pytest.FixtureRequest, dirs: Path, agent_binary: Path
) -> AsyncIterator[LocalProvider]:
    made = await opened(dirs, agent_binary, request.param)
    yield made
    await close(made)


@pytest.fixture
async def namespaces(dirs: Path, agent_binary: Path) -> AsyncIterator[LocalProvider]:
    made = await opened(dirs, agent_binary, Isolation.NAMESPACES)
    yield made
    await close(made)


async def run(box: Box, script: str, *, id: str = "e1") -> tuple[Exit, str]:
    request = ExecRequest(("/bin/sh", "-c", script), ExecId(id), env=ENV, timeout=15.0)
    exit, stdout, stderr, _ = await AgentLink(box.connect).collect(request)
    return exit, (stdout + stderr).decode()


async def output(box: Box, script: str, **options: str) -> str:
    exit, text = await run(box, script, **options)
    assert exit.exit_code == 0, text
    return text.strip()


async def handles(provider: LocalProvider) -> list[Handle]:
    return [handle async for handle in provider.owned()]


def leftovers(box: Box) -> list[str]:
    data = box.handle.data
    paths = [*data["cgroups"], data["disk_dir"], f"/proc/{data['keeper']}"]
    return [path for path in paths if path and os.path.lexists(path)]


async def test_two_servers_may_use_the_same_id(
    provider: LocalProvider, dirs: Path, agent_binary: Path
) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    other = LocalProvider(
        LocalSettings(
            provider.settings.data_dir, dirs / "run2", agent_binary, provider.settings.isolation
        )
    )
    await other.open()
    try:
        twin = await other.launch(SandboxId("one"), SPEC)
        await output(twin, "echo twin > file")
        await twin.destroy()
        assert await output(box, "ls") == ""
    finally:
        await close(other)


@pytest.mark.parametrize("by", ["destroy", "discard"])
async def test_a_box_whose_keeper_was_killed_is_removed(provider: LocalProvider, by: str) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    await run(box, "echo data > file; setsid sleep 1000 >/dev/null 2>&1 &")
    assert leftovers(box), "the test looks at the right places"
    os.kill(box.handle.data["keeper"], signal.SIGKILL)
    (handle,) = await handles(provider)
    assert await provider.adopt(handle) is None
    await (box.destroy() if by == "destroy" else provider.discard(handle))
    assert await handles(provider) == []
    await eventually(lambda: not leftovers(box), what="nothing of the box is left")


async def test_a_directory_without_a_record_is_discarded(provider: LocalProvider) -> None:
    """The server was killed between making the directory and writing the record."""
    half = provider.settings.run_dir / "boxes" / "half"
    await asyncio.to_thread(half.mkdir)
    (handle,) = await handles(provider)
    assert await provider.adopt(handle) is None
    await provider.discard(handle)
    assert await handles(provider) == []


async def test_a_box_whose_server_died_before_it_knew_the_pid_is_discarded(
    provider: LocalProvider,
) -> None:
    """Killed between the launcher's answer and the completed record."""
    box = await provider.launch(SandboxId("one"), SPEC)
    record = provider.settings.run_dir / "boxes/one/box.json"
    half = json.loads(await asyncio.to_thread(record.read_text))
    del half["keeper"], half["uid_base"]
    await asyncio.to_thread(record.write_text, json.dumps(half))
    (handle,) = await handles(provider)
    await provider.discard(handle)
    await eventually(lambda: not leftovers(box), what="nothing of the box is left")


@pytest.mark.parametrize("trouble", ["killed", "its socket is gone", "it does not listen"])
async def test_a_launcher_in_trouble_is_replaced(provider: LocalProvider, trouble: str) -> None:
    first = provider._launcher.pid
    assert first is not None
    (path,) = provider.settings.run_dir.glob("launcher/*.sock")
    with socket.socket(socket.AF_UNIX) as deaf:
        if trouble == "killed":
            os.kill(first, signal.SIGKILL)
        else:
            await asyncio.to_thread(path.unlink)
        if trouble == "it does not listen":
            deaf.bind(str(path))
        box = await provider.launch(SandboxId("one"), SPEC)
    assert await output(box, "echo alive") == "alive"
    second = provider._launcher.pid
    assert second != first and not alive(first)
    await provider.aclose()
    assert not alive(second)


@pytest.mark.parametrize(("cpus", "shown"), [(0.5, 1), (64.0, len(os.sched_getaffinity(0)))])
async def test_programs_see_the_boxes_cpus_and_memory(
    namespaces: LocalProvider, cpus: float, shown: int
) -> None:
    box = await namespaces.launch(SandboxId("one"), SandboxSpec(SPEC.template, Limits(cpus=cpus)))
    assert (await output(box, "nproc; sed -n 's/MemTotal: *//p' /proc/meminfo")).split() == [
        str(shown),
        str(512 * 1024),
        "kB",
    ]
    python = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))"
    node = 'const os = require("os"); console.log(os.cpus().length, os.availableParallelism())'
    for program, script in (("python3", f"-c '{python}'"), ("node", f"-e '{node}'")):
        if shutil.which(program, path=ENV["PATH"]):
            assert await output(box, f"{program} {script}", id=program) == f"{shown} {shown}"


async def test_what_it_writes_to_its_disk_is_counted(
    as_root: None, namespaces: LocalProvider
) -> None:
    for name in ("one", "two"):  # the second's device may have been the first's
        box = await namespaces.launch(SandboxId(name), SPEC)
        assert await output(box, "head -c 9000000 /dev/zero > big; sync big; wc -c < big")
        used = await AgentLink(box.connect).usage()
        assert 9_000_000 <= (used.io_write_bytes or 0) < 20_000_000
        await box.destroy()


async def test_a_data_folder_that_other_users_cannot_reach_is_refused(
    as_root: None, dirs: Path, agent_binary: Path
) -> None:
    os.chmod(dirs, 0o700)
    provider = LocalProvider(LocalSettings(dirs / "data", dirs / "run", agent_binary))
    with pytest.raises(UnavailableError, match="closed to others"):
        await provider.open()
    await provider.aclose()


def test_every_refusal_of_the_host_is_an_error_of_ours() -> None:
    codes = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "no_space")
    codes |= dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN), "capacity")
    for number in errno.errorcode:
        with pytest.raises(CapsuleError, match="made: ") as caught, host_errors("cannot be made"):
            raise OSError(number, os.strerror(number), "/some/where")
        assert caught.value.code == codes.get(number, "unavailable"), number


async def test_a_launch_that_fails_leaves_nothing(namespaces: LocalProvider) -> None:
    spec = SandboxSpec(SPEC.template, SPEC.limits, hostname="x" * 200)
    with pytest.raises(UnavailableError, match="sethostname"):
        await namespaces.launch(SandboxId("one"), spec)
    views = namespaces.settings.run_dir / "views"
    await asyncio.to_thread(shutil.rmtree, views, ignore_errors=True)
    await asyncio.to_thread(views.write_text, "")  # a file where a folder belongs
    with pytest.raises(UnavailableError, match="the sandbox cannot be prepared"):
        await namespaces.launch(SandboxId("one"), SPEC)
    assert await handles(namespaces) == []


@pytest.mark.needs("root", "cgroup")
async def test_what_could_not_be_removed_stays_owned(namespaces: LocalProvider) -> None:
    """Otherwise the rest of it would never be removed."""
    box = await namespaces.launch(SandboxId("one"), SPEC)
    in_the_way = Path(box.handle.data["cgroups"][0], "in-the-way")
    await asyncio.to_thread(in_the_way.mkdir)
    try:
        with pytest.raises(UnavailableError, match="not everything"):
            await box.destroy()
        assert [handle.sandbox_id for handle in await handles(namespaces)] == ["one"]
    finally:
        await asyncio.to_thread(in_the_way.rmdir)
    await box.destroy()
    assert await handles(namespaces) == []
    await eventually(lambda: not leftovers(box), what="nothing of the box is left")


@pytest.mark.needs("root", "cgroup")
async def test_cgroups_of_a_cleared_run_directory_are_removed_at_the_next_start(
    namespaces: LocalProvider, agent_binary: Path
) -> None:
    box = await namespaces.launch(SandboxId("one"), SPEC)
    own = [Path(each) for each in box.handle.data["cgroups"]]
    lost = [each.with_name(each.name.replace("one-", "lost-")) for each in own]
    for each in lost:
        await asyncio.to_thread(each.mkdir)
    settings = namespaces.settings
    again = await opened(settings.run_dir.parent, agent_binary, Isolation.NAMESPACES)
    await again.aclose()
    assert not any(map(os.path.lexists, lost)) and all(map(os.path.lexists, own))
    await box.destroy()


@pytest.mark.needs("root", "cgroup")
async def test_a_new_launcher_has_cgroups_of_its_own(
    namespaces: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scope, that is: the old one's ended with it, unless sandboxes live there."""
    old = await namespaces.launch(SandboxId("old"), SPEC)
    known, real = set(namespaces._cgroups.bases.values()), cgroups.prepare
    made = [base / f"scope-{namespaces._instance}" for base in known]

    def prepare(*args: Any) -> Cgroups:
        found = real(*args)
        for each in made:
            each.mkdir(exist_ok=True)
        bases = {name: base / made[0].name for name, base in found.bases.items()}
        return replace(found, bases=bases)

    monkeypatch.setattr(cgroups, "prepare", prepare)
    assert namespaces._launcher.pid is not None
    os.kill(namespaces._launcher.pid, signal.SIGKILL)
    box = await namespaces.launch(SandboxId("one"), SPEC)
    own = [Path(each) for each in box.handle.data["cgroups"]]
    assert {each.parent for each in own} == set(made) and all(map(os.path.lexists, own))
    (stored,) = [each for each in await handles(namespaces) if each.sandbox_id == "one"]
    assert stored == box.handle
    assert await output(box, "echo alive") == await output(old, "echo alive") == "alive"
    await box.destroy()
    await eventually(lambda: not leftovers(box), what="nothing of the box is left")
    for each in made:
        await asyncio.to_thread(each.rmdir)
