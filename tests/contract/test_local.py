"""The local provider keeps the contract, at every isolation level this machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capsule.model import Handle, Isolation
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from capsule.testing.harness import Leftovers, NewProvider
from capsule.testing.suite import *  # noqa: F403  # the tests

pytestmark = pytest.mark.real


LANDLOCK = pytest.param(Isolation.LANDLOCK, marks=pytest.mark.needs("landlock"))


@pytest.fixture(params=[Isolation.NAMESPACES, LANDLOCK])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    level: Isolation = request.param
    return level


@pytest.fixture
def new_provider(
    isolation: Isolation, data_dir: Path, run_dir: Path, agent_binary: Path
) -> NewProvider:
    settings = LocalSettings(data_dir, run_dir, agent_binary, isolation=isolation)
    return lambda: LocalProvider(settings)


@pytest.fixture(name="leftovers")
def leftovers_on_the_host(run_dir: Path) -> Leftovers:
    def look(handle: Handle) -> list[str]:
        data = handle.data
        paths = [
            *data.get("cgroups", ()),
            data.get("disk_dir"),
            run_dir / "boxes" / handle.sandbox_id,
        ]
        found = [str(path) for path in paths if path and os.path.lexists(path)]
        return found + [pid for pid in _processes() if _belongs(pid, handle)]

    return look


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _belongs(pid: str, handle: Handle) -> bool:
    """The keeper, whatever runs as a user of the box, and whatever is a child of these."""
    base = handle.data.get("uid_base") or 0
    if pid == str(handle.data.get("keeper")):
        return True
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return False
    return bool(base) and base <= uid < base + 65_536
