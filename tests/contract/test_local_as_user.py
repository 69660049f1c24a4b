"""The same contract when the server is an ordinary user: run by one, if the suite runs as root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.users import User

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_an_ordinary_user_gets_the_same_contract(
    as_root: None, as_user: User, agent_binary: Path
) -> None:
    shutil.copytree(ROOT / "tests", as_user.home / "tests")
    shutil.copy(ROOT / "pyproject.toml", as_user.home)
    agent = as_user.home / "capsule-agent"
    shutil.copy(agent_binary, agent)
    agent.chmod(0o755)
    pytest_here = (as_user.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0")
    ended = as_user.run(
        *pytest_here,
        f"--basetemp={as_user.home}/tmp",
        *("-m", "not serial"),  # others run beside this
        "tests/contract/test_local.py",
        timeout=880,
        env={"CAPSULE_AGENT": str(agent), "CI": os.environ.get("CI", "")},
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2000:]
