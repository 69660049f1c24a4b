"""The contract, pause, snapshots and volumes when the server is an ordinary user: without uids or
cgroups of its own, on a disk in memory."""

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

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.needs("root")]


def run_tests_as(user: User, agent_binary: Path, *words: str, timeout: float) -> str:
    shutil.copytree(ROOT / "tests", user.home / "tests")
    shutil.copy(ROOT / "pyproject.toml", user.home)
    agent = user.home / "capsule-agent"
    shutil.copy(agent_binary, agent)
    agent.chmod(0o755)
    ended = user.run(
        *(user.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"),
        f"--basetemp={user.home}/tmp",
        *words,
        timeout=timeout,
        env={"CAPSULE_AGENT": str(agent), "CI": os.environ.get("CI", "")},
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.timeout(900)
def test_an_ordinary_user_keeps_the_contract(as_user: User, agent_binary: Path) -> None:
    words = ("-m", "not serial", "tests/contract/test_local.py")  # others run beside this
    run_tests_as(as_user, agent_binary, *words, timeout=880)


@pytest.mark.serial
@pytest.mark.timeout(300)
def test_an_ordinary_user_has_state(as_user: User, agent_binary: Path) -> None:
    names = "pause snapshots steps step_trees step_files volumes kept users sudo".split()
    files = [f"tests/unit/test_{name}_real.py" for name in names]
    output = run_tests_as(as_user, agent_binary, *files, timeout=280)
    assert " skipped" not in output.splitlines()[-1], output


def test_the_root_of_a_box_is_there_before_its_programs(as_user: User) -> None:
    """Programs have the uid of the user who runs the box, and could stop its making of root."""
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
