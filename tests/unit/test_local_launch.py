"""Launches: with a disk and a network made ahead, given up in the middle, and on odd hosts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import UnavailableError
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
from capsule.providers.local import plan
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from tests.support import eventually
from tests.support.folders import server_folder

pytestmark = [pytest.mark.real, pytest.mark.needs("root", "e2fsprogs", "landlock")]

SPEC = SandboxSpec(Template("test", needs=("sh",)), Limits(disk=64 * MIB, inodes=2000))
NS_GET_USERNS = 0xB701  # <linux/nsfs.h>


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


async def test_the_third_of_a_kind_takes_it(provider: LocalProvider, folder: Path) -> None:
    ahead = await made_ahead(provider, folder)
    assert devices(folder) >= {ahead}
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


async def test_it_goes_with_the_server(provider: LocalProvider, folder: Path) -> None:
    ahead = await made_ahead(provider, folder)
    await provider.aclose()
    assert ahead not in await has(folder, 2)


# Launches that fail, and hosts that have changed


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the mounts of the next launches, but for the first so many."""
    real = plan.mounts

    def change(keep: int, *others: dict[str, Any]) -> None:
        monkeypatch.setattr(plan, "mounts", lambda *given: [*real(*given)[:keep], *others])

    return change


# As the host's root, who may do anything in the box's mount namespace: takes its root away.
UNDERNEATH = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
space, proc = os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY), os.open("/proc", os.O_RDONLY)
assert libc.setns(space, 0x20000) == 0, ctypes.get_errno()
assert os.path.isdir("/workspace")
assert libc.umount2(b"/", 2) == 0, ctypes.get_errno()
assert libc.setns(space, 0x20000) == 0, ctypes.get_errno()
mounts = os.read(os.open("self/mountinfo", os.O_RDONLY, dir_fd=proc), 1 << 20).decode()
found = {name: os.listdir(f"/{name}") for name in os.listdir("/")}
print(json.dumps([found, [line.split() for line in mounts.splitlines()]]))
"""


async def test_without_landlock_a_box_starts_as_well(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pivot_root then: the kernel itself keeps what is mounted so from being unmounted."""
    monkeypatch.setattr(plan, "landlock", lambda *_: None)
    box = await launch(provider, "box")
    assert {"workspace", "host"} & set((await sh(box, "ls /")).split()) == {"workspace"}
    assert not underneath(box).stdout


def underneath(box: Box) -> subprocess.CompletedProcess[str]:
    keeper = box.handle.data["keeper"]
    (first,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    command = [sys.executable, "-c", UNDERNEATH, first]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


async def test_below_its_root_is_nothing_of_the_host(provider: LocalProvider) -> None:
    box = await launch(provider, "box")
    found = underneath(box)
    assert not found.stderr
    folders, mounts = json.loads(found.stdout)
    assert sorted(folders) == ["disk", "host", "proc", "root"]
    assert "workspace" in folders["disk"] and not folders["host"] + folders["root"]
    assert not [name for name in folders["proc"] if name.isdigit()], "a procfs that nobody is in"
    points = {words[4]: (words[5].split(",")[0], words[words.index("-") + 1]) for words in mounts}
    assert points == {"/": ("ro", "tmpfs"), "/disk": ("rw", "ext4"), "/proc": ("rw", "proc")}


@pytest.mark.parametrize("keep", [0, 20])
async def test_a_launch_that_fails_says_why(
    provider: LocalProvider, mounts: Callable[..., None], keep: int
) -> None:
    mounts(keep, {"type": "bind", "from": "/nowhere/at/all", "to": "" if not keep else "usr"})
    for turn in range(3):
        with pytest.raises(UnavailableError, match="bind /nowhere/at/all: No such file"):
            await launch(provider, f"box{turn}")
    assert [handle async for handle in provider.owned()] == []


async def test_an_empty_folder_that_is_missing_is_no_reason_to_show_what_is_masked(
    provider: LocalProvider, mounts: Callable[..., None]
) -> None:
    shown = next(name for name in plan._present(plan.MASKED) if os.path.isdir(f"/proc/{name}"))
    mask = {"type": "mask", "to": f"proc/{shown}", "from": "/nowhere/empty"}
    mounts(5, mask)
    with pytest.raises(UnavailableError, match=f"mask proc/{shown}: No such file"):
        await launch(provider, "box")


# In a process of its own, since what is odd stays with it. Two boxes: the second has a disk that
# was made ahead.
LAUNCH = """
import asyncio, ctypes, sys
from pathlib import Path
from capsule.link.link import AgentLink
from capsule.model import MIB, ExecId, ExecRequest, Limits, SandboxId, SandboxSpec, Template
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings

folder, agent, root, without = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if without >= 0:
    ctypes.CDLL(None).prctl(24, without)  # PR_CAPBSET_DROP
SPEC = SandboxSpec(Template("test", root=root, needs=("sh",)), Limits(disk=64 * MIB, inodes=2000))
REQUEST = ExecRequest(("/bin/sh", "-c", "echo of a box"), ExecId("e"))

async def main():
    provider = LocalProvider(LocalSettings(folder / "data", folder / "run", agent))
    await provider.open()
    try:
        for turn in range(2):
            box = await provider.launch(SandboxId(f"box{turn}"), SPEC)
            done = await AgentLink(box.connect).collect(REQUEST)
            print(box.isolation, done.stdout.decode().strip())
    finally:
        async for handle in provider.owned():
            await provider.discard(handle)
        await provider.aclose()

asyncio.run(main())
"""

IN_NAMESPACES = ["namespaces of a box"] * 2


def launched(
    folder: Path, agent: Path, *, after: str = "", root: str = "host", without: int = -1
) -> list[str]:
    """What two boxes print that are launched in a new mount namespace, after that command."""
    launch = [sys.executable, "-c", LAUNCH, str(folder), str(agent), root, str(without)]
    command = ["unshare", "-m", "sh", "-ec", f'{after or ":"}; exec $wrap "$@"', "sh", *launch]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_without_the_right_to_change_the_root(folder: Path, agent_binary: Path) -> None:
    assert launched(folder, agent_binary, without=18) == IN_NAMESPACES  # CAP_SYS_CHROOT


def test_in_a_chroot_it_stays_there(folder: Path, agent_binary: Path) -> None:
    """The kernel grants no user namespace there: it would show what the chroot hides."""
    other = folder / "other"
    other.mkdir()
    after = f"mount --rbind / {other}; wrap='chroot {other}'"
    assert launched(folder, agent_binary, after=after) == ["landlock of a box"] * 2


def test_with_its_files_where_nothing_may_be_bound(folder: Path, agent_binary: Path) -> None:
    after = f"mount -t tmpfs -o mode=755 tmpfs {folder}; mount --make-unbindable {folder}"
    assert launched(folder, agent_binary, after=after) == IN_NAMESPACES


# Some of them: the kernel takes those alone whose number is higher, and not all newer ones' are.
BIND = """
own=$(readlink /proc/self/ns/mnt)
for each in $(seq 50); do
    unshare -m sleep 60 & pid=$!
    until [ "$(readlink /proc/$pid/ns/mnt)" != "$own" ]; do sleep .01; done
    mount --bind /proc/$pid/ns/mnt {0} 2> /dev/null && bound=yes || bound=
    kill $pid
    [ "$bound" ] && break
done
[ "$bound" ]"""


@pytest.fixture(params=["host", "overlay"])
def root(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "host":
        return "host"
    image = folder / "image"
    linked = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout
    for path in ["/bin/sh", *re.findall(r"(/\S+) \(", linked)]:
        (image / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, image / path[1:])
    return f"dir:{image}"


def test_beside_the_file_of_a_mount_namespace(folder: Path, agent_binary: Path, root: str) -> None:
    """As snaps have them. The kernel moves none into another namespace."""
    bound = folder / "bound"
    bound.touch()
    assert launched(folder, agent_binary, after=BIND.format(bound), root=root) == IN_NAMESPACES
