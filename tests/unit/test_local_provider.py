"""Real boxes of the local provider, at every isolation level this machine has."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import CapsuleError, ConflictError, NotFoundError, UnavailableError
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
from capsule.providers.local.cgroups import OURS
from capsule.providers.local.launcher import Launcher
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from tests.support import eventually
from tests.support.cgroups import read_values
from tests.support.folders import server_folder
from tests.support.users import User

pytestmark = pytest.mark.real

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/workspace", "LANG": "C.UTF-8"}
SPEC = SandboxSpec(Template("test", needs=("sh",)), Limits(disk=64 * MIB, inodes=2000))


@pytest.fixture
def dirs() -> Iterator[Path]:
    """Where other users can pass through, which pytest's own directories do not allow."""
    with server_folder("cap-", data="data") as path:
        yield path


def settings(dirs: Path, agent: Path, level: Isolation | None = None) -> LocalSettings:
    return LocalSettings(dirs / "data", dirs / "run", agent, isolation=level)


async def opened(dirs: Path, agent: Path, level: Isolation | None = None) -> LocalProvider:
    provider = LocalProvider(settings(dirs, agent, level))
    try:
        await provider.open()
    except UnavailableError as exc:
        await provider.aclose()
        pytest.skip(f"this host cannot: {exc.message}")
    return provider


async def close(provider: LocalProvider) -> None:
    """Nothing is left behind by a test, even one that failed."""
    async for handle in provider.owned():
        await provider.discard(handle)
    await provider.aclose()


@pytest.fixture(params=[Isolation.NAMESPACES, Isolation.LANDLOCK])
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


async def output(box: Box, script: str, **options: Any) -> str:
    exit, text = await run(box, script, **options)
    assert exit.exit_code == 0, text
    return text.strip()


async def handles(provider: LocalProvider) -> list[Handle]:
    return [handle async for handle in provider.owned()]


def leftovers(box: Box) -> list[str]:
    data = box.handle.data
    paths = [*data["cgroups"], data["disk_dir"], f"/proc/{data['keeper']}"]
    return [path for path in paths if path and os.path.lexists(path)]


def alive(pid: int | None) -> bool:
    return os.path.lexists(f"/proc/{pid}")


async def test_a_launched_box_runs_programs(provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    assert await output(box, "echo hello > file; cat file") == "hello"
    assert [handle.sandbox_id for handle in await handles(provider)] == ["one"]


async def test_a_destroyed_box_leaves_nothing(provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    await run(box, "echo data > file; sleep 1000 & setsid sleep 1000 &")
    assert leftovers(box), "the test looks at the right places"
    await box.destroy()
    await eventually(lambda: not leftovers(box), what="nothing of the box is left")
    assert await handles(provider) == []


async def test_destroy_can_be_repeated(provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    await box.destroy()
    await box.destroy()
    with pytest.raises(UnavailableError):
        await box.connect()


async def test_an_id_in_use_is_a_conflict(provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    with pytest.raises(ConflictError):
        await provider.launch(SandboxId("one"), SPEC)
    assert await output(box, "echo alive") == "alive"


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


async def test_a_missing_interpreter_is_named(provider: LocalProvider) -> None:
    spec = SandboxSpec(Template("cobol", needs=("sh", "no-such-cobol")), Limits())
    with pytest.raises(NotFoundError, match="needs no-such-cobol") as caught:
        await provider.launch(SandboxId("one"), spec)
    assert caught.value.hint
    assert await handles(provider) == []


async def test_a_box_outlives_its_server(
    provider: LocalProvider, dirs: Path, agent_binary: Path
) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    await output(box, "echo kept > file")
    await provider.aclose()

    successor = LocalProvider(provider.settings)
    await successor.open()
    try:
        (handle,) = await handles(successor)
        adopted = await successor.adopt(handle)
        assert adopted is not None
        assert adopted.isolation is box.isolation
        assert list(adopted.unenforced) == list(box.unenforced)
        assert await output(adopted, "cat file", id="e2") == "kept"
        await adopted.destroy()
    finally:
        await close(successor)


async def test_what_is_gone_is_not_adopted(provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    await box.destroy()
    assert await provider.adopt(box.handle) is None


async def test_a_killed_keeper_is_swept_up(provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    await run(box, "echo data > file; setsid sleep 1000 >/dev/null 2>&1 &")
    os.kill(box.handle.data["keeper"], signal.SIGKILL)
    (handle,) = await handles(provider)
    assert await provider.adopt(handle) is None
    await provider.discard(handle)
    await provider.discard(handle)
    assert await handles(provider) == []
    await eventually(lambda: not leftovers(box), what="nothing of the box is left")


async def test_destroy_sweeps_a_box_whose_keeper_was_killed(provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    os.kill(box.handle.data["keeper"], signal.SIGKILL)
    await box.destroy()
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


async def test_a_failed_launch_leaves_nothing(namespaces: LocalProvider) -> None:
    spec = SandboxSpec(SPEC.template, SPEC.limits, hostname="x" * 200)
    with pytest.raises(UnavailableError, match="sethostname"):
        await namespaces.launch(SandboxId("one"), spec)
    assert await handles(namespaces) == []


@pytest.mark.parametrize("after_ms", [0.1, 0.5, 1, 2, 3, 4, 6])
async def test_a_cancelled_launch_leaves_nothing(provider: LocalProvider, after_ms: float) -> None:
    try:
        async with asyncio.timeout(after_ms / 1000):
            await provider.launch(SandboxId("one"), SPEC)
    except TimeoutError:
        assert await handles(provider) == []
        await eventually(lambda: not keepers(provider), what="no keeper is left")


def keepers(provider: LocalProvider) -> list[str]:
    """Children of the launcher, which are keepers and what they become."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if path.read_text().rpartition(")")[2].split()[1] == str(provider._launcher.pid):
                found.append(path.parent.name)
    return found


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


async def test_a_launcher_that_died_is_started_again(provider: LocalProvider) -> None:
    first = provider._launcher.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    box = await provider.launch(SandboxId("one"), SPEC)
    assert provider._launcher.pid != first
    assert await output(box, "echo alive") == "alive"


async def test_a_launcher_nobody_can_reach_is_replaced(provider: LocalProvider) -> None:
    """Somebody tidied up /run."""
    first = provider._launcher.pid
    (path,) = provider.settings.run_dir.glob("launcher/*.sock")
    await asyncio.to_thread(path.unlink)
    box = await provider.launch(SandboxId("one"), SPEC)
    assert await output(box, "echo alive") == "alive"
    assert not alive(first)


async def test_a_launcher_that_lives_and_does_not_listen_is_replaced(
    provider: LocalProvider,
) -> None:
    """As one that was killed does not, for the moment that it takes to end."""
    first = provider._launcher.pid
    (path,) = provider.settings.run_dir.glob("launcher/*.sock")
    await asyncio.to_thread(path.unlink)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        box = await provider.launch(SandboxId("one"), SPEC)
    assert await output(box, "echo alive") == "alive"
    assert not alive(first)


@pytest.mark.parametrize("turns", range(4))
async def test_a_start_that_is_cancelled_leaves_one_launcher_or_none(
    dirs: Path, agent_binary: Path, turns: int
) -> None:
    launcher = Launcher(agent_binary, dirs / "launcher")
    starting = asyncio.create_task(launcher.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    first = launcher.pid
    await launcher.start()
    assert launcher.pid == first or first is None
    pid = launcher.pid
    await launcher.aclose()
    assert not alive(pid) and not list(dirs.glob("launcher/*.sock"))


async def test_the_launcher_ends_with_the_provider(dirs: Path, agent_binary: Path) -> None:
    provider = await opened(dirs, agent_binary)
    pid = provider._launcher.pid
    await provider.aclose()
    assert not alive(pid)
    with pytest.raises(UnavailableError):
        await provider.launch(SandboxId("one"), SPEC)


async def test_many_launches_at_once(provider: LocalProvider) -> None:
    ids = [SandboxId(f"box{n}") for n in range(20)]
    boxes = await asyncio.gather(*(provider.launch(each, SPEC) for each in ids))
    texts = await asyncio.gather(*(output(box, f"echo {n}") for n, box in enumerate(boxes)))
    assert texts == [str(n) for n in range(20)]
    await asyncio.gather(*(box.destroy() for box in boxes))
    assert await handles(provider) == []


async def test_the_servers_environment_is_not_inherited(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_SECRET", "hunter2")
    box = await provider.launch(SandboxId("one"), SPEC)
    text = await output(box, "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; true")
    assert "HOME=" in text and "hunter2" not in text


async def test_the_box_is_its_own_machine(namespaces: LocalProvider) -> None:
    box = await namespaces.launch(SandboxId("one"), SPEC)
    text = await output(
        box,
        "id -un; hostname; pwd; ls -A /dev; echo --; cat /proc/net/dev | tail -n +3 | cut -d: -f1",
    )
    before, after = text.split("--")
    assert before.split() == [
        "capsule", "capsule", "/workspace", "fd", "full", "null", "ptmx", "pts", "random", "shm",
        "stderr", "stdin", "stdout", "tty", "urandom", "zero",
    ]  # fmt: skip
    assert after.split() == ["lo"]


@pytest.mark.parametrize(("cpus", "shown"), [(0.5, 1), (64.0, len(os.sched_getaffinity(0)))])
async def test_programs_see_the_boxes_cpus(
    namespaces: LocalProvider, cpus: float, shown: int
) -> None:
    spec = SandboxSpec(SPEC.template, Limits(cpus=cpus))
    box = await namespaces.launch(SandboxId("one"), spec)
    assert await output(box, "nproc") == str(shown)
    python = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))"
    if shutil.which("python3", path=ENV["PATH"]):
        assert await output(box, f"python3 -c '{python}'", id="e2") == f"{shown} {shown}"
    if shutil.which("node", path=ENV["PATH"]):
        node = 'const os = require("os"); console.log(os.cpus().length, os.availableParallelism())'
        assert await output(box, f"node -e '{node}'", id="e3") == f"{shown} {shown}"


async def test_free_shows_the_boxes_memory(namespaces: LocalProvider) -> None:
    box = await namespaces.launch(SandboxId("one"), SPEC)
    assert (await output(box, "head -1 /proc/meminfo")).split()[1] == str(512 * 1024)


async def test_the_disk_is_as_large_as_was_asked_for(namespaces: LocalProvider) -> None:
    box = await namespaces.launch(SandboxId("one"), SPEC)
    _, text = await run(box, "head -c 60000000 /dev/zero > big; head -c 9000000 /dev/zero > more")
    assert "No space left" in text
    used = sum(int(size) for size in (await output(box, "stat -c %s big more", id="e2")).split())
    assert 56 * MIB < used <= 64 * MIB


async def test_files_are_as_many_as_were_asked_for(namespaces: LocalProvider) -> None:
    box = await namespaces.launch(SandboxId("one"), SPEC)
    assert "No space left" in (await run(box, "seq 3000 | xargs touch"))[1]
    made = int(await output(box, "ls | wc -l", id="e2"))
    assert 2000 <= made <= 2200, "ext4 rounds up to whole blocks of its inode table"


async def test_what_it_writes_to_its_disk_is_counted(
    as_root: None, namespaces: LocalProvider
) -> None:
    for name in ("one", "two"):  # the second's device may have been the first's
        box = await namespaces.launch(SandboxId(name), SPEC)
        assert await output(box, "head -c 9000000 /dev/zero > big; sync big; wc -c < big")
        used = await AgentLink(box.connect).usage()
        assert 9_000_000 <= (used.io_write_bytes or 0) < 20_000_000
        await box.destroy()


async def test_a_box_can_start_from_a_directory(namespaces: LocalProvider, dirs: Path) -> None:
    root = dirs / "rootfs"
    await asyncio.to_thread(_small_root, root)
    spec = SandboxSpec(Template("small", root=f"dir:{root}", needs=("sh",)), SPEC.limits)
    box = await namespaces.launch(SandboxId("one"), spec)
    assert await output(box, "cat /hello; ls -d /workspace /proc/self /usr/bin/id") != ""
    assert (await run(box, "echo x > /hello", id="e2"))[0].exit_code != 0


def _small_root(root: Path) -> None:
    """A root of the host's shell, a few tools, and what these need to load."""
    for name in ("bin", "lib64", "lib", "usr/bin"):
        (root / name).mkdir(parents=True)
    (root / "hello").write_text("hello\n")
    for source in ("/bin/sh", "/bin/cat", "/bin/ls", "/usr/bin/id"):
        shutil.copy(source, root / source.lstrip("/"))
        needed = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
        for library in (word for word in needed.split() if word.startswith("/")):
            (root / library.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library.lstrip("/"))


async def test_a_directory_that_is_not_there_is_not_found(namespaces: LocalProvider) -> None:
    spec = SandboxSpec(Template("lost", root="dir:/no/such/place"), SPEC.limits)
    with pytest.raises(NotFoundError, match="no usable root"):
        await namespaces.launch(SandboxId("one"), spec)


async def test_two_boxes_share_no_uid(as_root: None, provider: LocalProvider) -> None:
    first = await provider.launch(SandboxId("one"), SPEC)
    second = await provider.launch(SandboxId("two"), SPEC)
    assert first.handle.data["uid_base"] != second.handle.data["uid_base"]
    assert min(first.handle.data["uid_base"], second.handle.data["uid_base"]) >= 268435456


async def test_the_limits_are_in_the_cgroup(as_root: None, provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("one"), SPEC)
    if not box.handle.data["cgroups"]:
        pytest.skip("this host has no usable cgroups")
    values = await asyncio.to_thread(read_values, map(Path, box.handle.data["cgroups"]))
    assert values["pids.max"] == str(SPEC.limits.processes + OURS)
    memory = values.get("memory.max") or values.get("memory.limit_in_bytes")
    assert memory == str(SPEC.limits.memory)
    assert values.get("cpu.max", "50000").split()[0] == values.get("cpu.cfs_quota_us", "50000")


async def test_as_root_everything_is_enforced(as_root: None, namespaces: LocalProvider) -> None:
    box = await namespaces.launch(SandboxId("one"), SPEC)
    if not box.handle.data["cgroups"]:
        pytest.skip("this host has no usable cgroups")
    assert list(box.unenforced) == []


async def test_probe_names_the_level_and_every_gap(provider: LocalProvider) -> None:
    found = await provider.probe()
    assert found.usable and found.isolation is provider.settings.isolation
    assert all(finding.fix for finding in found.findings if not finding.ok)
    assert all(gap.why and gap.fix for gap in found.unenforced)


async def test_a_data_dir_nobody_else_can_reach_is_refused(
    as_root: None, dirs: Path, agent_binary: Path
) -> None:
    os.chmod(dirs, 0o700)
    provider = LocalProvider(settings(dirs, agent_binary))
    try:
        with pytest.raises(UnavailableError, match="closed to others"):
            await provider.open()
    finally:
        await provider.aclose()


AS_A_USER = """
import asyncio, json, sys
from pathlib import Path
from capsule.link.link import AgentLink
from capsule.model import *
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings

async def main():
    home, agent, level = (Path(each) for each in sys.argv[1:])
    level = Isolation(str(level))
    provider = LocalProvider(LocalSettings(home / "d", home / "r", agent, isolation=level))
    await provider.open()
    box = await provider.launch(SandboxId("one"), SandboxSpec(Template("t"), Limits()))
    request = ExecRequest(("/bin/sh", "-c", "id -u; echo hi > f; cat f"), ExecId("e"),
                          env={"PATH": "/usr/bin:/bin"})
    exit, out, err, _ = await AgentLink(box.connect).collect(request)
    gaps = [gap.what for gap in box.unenforced]
    await box.destroy()
    left = [handle.sandbox_id async for handle in provider.owned()]
    await provider.aclose()
    out = (out + err).decode()
    print(json.dumps({"code": exit.exit_code, "out": out, "gaps": gaps, "left": left}))

asyncio.run(main())
"""


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
async def test_an_ordinary_user_gets_boxes_too(
    as_user: User, agent_binary: Path, level: str
) -> None:
    ended = await asyncio.to_thread(
        as_user.run, as_user.python, "-c", AS_A_USER, str(as_user.home), str(agent_binary), level
    )
    if "UnavailableError" in ended.stderr:
        pytest.skip(f"this host cannot: {ended.stderr.splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    uid = "1000" if level == "namespaces" else str(as_user.uid)
    assert (result["code"], result["out"], result["left"]) == (0, f"{uid}\nhi\n", [])
    assert isinstance(result["gaps"], list)


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_refusal_of_the_host_is_an_error_of_ours(number: int) -> None:
    with pytest.raises(CapsuleError, match="made: ") as caught, host_errors("it cannot be made"):
        raise OSError(number, os.strerror(number), "/some/where")
    codes = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "no_space")
    codes |= dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN), "capacity")
    assert caught.value.code == codes.get(number, "unavailable")


async def test_what_keeps_the_host_from_preparing_a_box_is_told(namespaces: LocalProvider) -> None:
    """Here: a file where a folder for what the box is shown belongs."""
    views = namespaces.settings.run_dir / "views"
    await asyncio.to_thread(shutil.rmtree, views, ignore_errors=True)
    await asyncio.to_thread(views.write_text, "")
    with pytest.raises(UnavailableError, match="the sandbox cannot be prepared"):
        await namespaces.launch(SandboxId("one"), SPEC)
    assert await handles(namespaces) == []


async def test_errors_of_a_launch_are_ours_alone(provider: LocalProvider) -> None:
    """Whatever goes wrong below, the caller sees a CapsuleError."""
    agent = Path(sys.executable).parent / "no-such-agent"
    broken = LocalProvider(
        LocalSettings(provider.settings.data_dir, provider.settings.run_dir, agent)
    )
    with pytest.raises(CapsuleError):
        await broken.open()
    await broken.aclose()


async def test_what_could_not_be_removed_stays_owned(
    as_root: None, provider: LocalProvider
) -> None:
    """Or nobody would ever look for the rest of it."""
    box = await provider.launch(SandboxId("one"), SPEC)
    if not box.handle.data["cgroups"]:
        pytest.skip("this host has no usable cgroups")
    in_the_way = Path(box.handle.data["cgroups"][0], "in-the-way")
    await asyncio.to_thread(in_the_way.mkdir)
    try:
        with pytest.raises(UnavailableError, match="not everything"):
            await box.destroy()
        assert [handle.sandbox_id for handle in await handles(provider)] == ["one"]
    finally:
        await asyncio.to_thread(in_the_way.rmdir)
    await box.destroy()
    assert await handles(provider) == []
    await eventually(lambda: not leftovers(box), what="nothing of the box is left")
