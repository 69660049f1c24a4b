"""Boxes on hosts that are set up in an odd way: each starts at the level it always had there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.folders import server_folder

pytestmark = [pytest.mark.real, pytest.mark.needs("root", "landlock", "e2fsprogs")]

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


@pytest.fixture
def folder() -> Iterator[Path]:
    with server_folder("cap-", data="data") as path:
        yield path


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
