"""Pause, snapshots and volumes when the server is an ordinary user: without uids or cgroups of its
own, on a disk in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.users import User

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.serial]

NAMES = (
    "pause",
    "snapshots",
    "steps",
    "step_trees",
    "step_files",
    "volumes",
    "kept",
    "users",
    "sudo",
)
FILES = tuple(f"tests/unit/test_{name}_real.py" for name in NAMES)


@pytest.mark.timeout(300)
def test_an_ordinary_user_can_do_the_same(as_root: None, as_user: User, agent_binary: Path) -> None:
    shutil.copytree(ROOT / "tests", as_user.home / "tests")
    shutil.copy(ROOT / "pyproject.toml", as_user.home)
    agent = as_user.home / "capsule-agent"
    shutil.copy(agent_binary, agent)
    agent.chmod(0o755)
    ended = as_user.run(
        *(as_user.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"),
        f"--basetemp={as_user.home}/tmp",
        *FILES,
        timeout=280,
        env={"CAPSULE_AGENT": str(agent), "CI": os.environ.get("CI", "")},
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2000:]
    assert " skipped" not in ended.stdout.splitlines()[-1], ended.stdout


def test_a_box_of_theirs_has_its_root_before_programs_run(as_root: None, as_user: User) -> None:
    """Programs have the uid of whoever makes it, and could stop him while pid 1 waits."""
    words = as_user.capsule("run", "-t", "base", "-l", "bash", "echo up; sleep 60")
    running = as_user.popen(*words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    with running:
        try:
            assert running.stdout is not None and running.stdout.readline() == "up\n"
            spaces = [space for pid in firsts_of(as_user.uid) for space in held_by(pid)]
            assert any(space.startswith("user:") for space in spaces), spaces
        finally:
            running.terminate()


def firsts_of(uid: int) -> Iterator[str]:
    """The processes of this user that are the first of a pid namespace."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            if status["Uid"].split()[0] == str(uid) and status["NSpid"].split()[1:] == ["1"]:
                yield pid


def held_by(pid: str) -> Iterator[str]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{fd}")
