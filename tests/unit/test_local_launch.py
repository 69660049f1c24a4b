"""A launch that pid 1 gives up in the middle, and one that finds the host changed."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import UnavailableError
from capsule.link.link import AgentLink
from capsule.model import ExecId, ExecRequest, SandboxId
from capsule.providers.contract import Box
from capsule.providers.local import plan
from capsule.providers.local.provider import LocalProvider
from tests.unit.test_local_ahead import SPEC, folder, provider

__all__ = ["folder", "provider"]

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("as_root")]

LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0  # its version, if the kernel has it


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Changes the table of mounts: so many at its beginning are kept, then come others."""
    real = plan.mounts

    def change(keep: int, *others: dict[str, Any]) -> None:
        def changed(*given: Any) -> list[dict[str, Any]]:
            return [*real(*given)[:keep], *others]

        monkeypatch.setattr(plan, "mounts", changed)

    return change


@pytest.fixture
def refused_at_last(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on pid 1 fails when its root stands already, at what it does last."""
    if not LANDLOCK:
        pytest.skip("this kernel has no Landlock, and nothing else can be refused at last")
    real = plan.landlock

    def start() -> None:
        def broken(*given: Any) -> dict[str, Any] | None:
            rules = real(*given)
            return None if rules is None else {**rules, "rules": [["/usr"]]}

        monkeypatch.setattr(plan, "landlock", broken)

    return start


async def test_a_box_that_fails_at_last_is_looked_at_to_its_end(
    provider: LocalProvider, refused_at_last: Callable[[], None]
) -> None:
    await provider.launch(SandboxId("first"), SPEC)
    refused_at_last()
    for turn in range(2):
        with pytest.raises(UnavailableError, match=r"landlock\.rules"):
            await provider.launch(SandboxId(f"box{turn}"), SPEC)
    assert [handle.sandbox_id async for handle in provider.owned()] == ["first"]


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
    box = await provider.launch(SandboxId("box"), SPEC)
    done = await AgentLink(box.connect).collect(ExecRequest(("/bin/ls", "/"), ExecId("e")))
    assert b"workspace\n" in done.stdout and b"host\n" not in done.stdout
    assert not underneath(box).stdout


def underneath(box: Box) -> subprocess.CompletedProcess[str]:
    keeper = box.handle.data["keeper"]
    (first,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    command = [sys.executable, "-c", UNDERNEATH, first]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


async def test_below_its_root_is_nothing_of_the_host(provider: LocalProvider) -> None:
    box = await provider.launch(SandboxId("box"), SPEC)
    found = underneath(box)
    assert not found.stderr
    folders, mounts = json.loads(found.stdout)
    assert sorted(folders) == ["disk", "host", "proc", "root"]
    assert "workspace" in folders["disk"] and not folders["host"] + folders["root"]
    assert not [name for name in folders["proc"] if name.isdigit()], "a procfs that nobody is in"
    points = {words[4]: (words[5].split(",")[0], words[words.index("-") + 1]) for words in mounts}
    assert points == {"/": ("ro", "tmpfs"), "/disk": ("rw", "ext4"), "/proc": ("rw", "proc")}


@pytest.mark.parametrize("keep", [0, 1, 20, 40])
async def test_it_says_why(provider: LocalProvider, mounts: Callable[..., None], keep: int) -> None:
    """However far it came: the keeper is at work beside it, and may be told first."""
    mounts(keep, {"type": "bind", "from": "/nowhere/at/all", "to": "" if not keep else "usr"})
    for turn in range(5):
        with pytest.raises(UnavailableError, match="bind /nowhere/at/all: No such file"):
            await provider.launch(SandboxId(f"box{turn}"), SPEC)
    assert [handle async for handle in provider.owned()] == []


async def test_what_is_no_longer_there_needs_no_mask(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's module was unloaded since the server has looked."""
    gone = ("a-file", "a-folder")
    present, folders = plan._present(plan.MASKED), plan._folders(plan.MASKED)
    real = plan._present
    monkeypatch.setattr(
        plan, "_present", lambda names: [*present, *gone] if names is plan.MASKED else real(names)
    )
    monkeypatch.setattr(plan, "_folders", lambda _: folders | {"a-folder"})
    box = await provider.launch(SandboxId("box"), SPEC)
    assert (await AgentLink(box.connect).ping()) is not None


async def test_an_empty_folder_that_is_missing_is_no_reason_to_show_what_is_masked(
    provider: LocalProvider, mounts: Callable[..., None]
) -> None:
    shown = next(name for name in plan._present(plan.MASKED) if os.path.isdir(f"/proc/{name}"))
    mask = {"type": "mask", "to": f"proc/{shown}", "from": "/nowhere/empty"}
    mounts(5, mask)
    with pytest.raises(UnavailableError, match=f"mask proc/{shown}: No such file"):
        await provider.launch(SandboxId("box"), SPEC)
