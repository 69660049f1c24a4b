"""Pause, snapshots and volumes when the server is an ordinary user: without uids or cgroups of its
own, on a disk in memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.users import User

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.serial]

NAMES = ("pause", "snapshots", "steps", "volumes", "kept", "users", "sudo")
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
