from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.daemon import Daemon
from tests.support import component_missing
from tests.support.engine import EngineMissing
from tests.support.nursery import OWN, Nursery


@pytest.fixture(scope="session")
def own_nursery(agent_binary: Path) -> Nursery:
    """Servers of whoever runs the tests."""
    return OWN.nursery


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A dockerd for the tests of one worker; ask for `docker`."""
    try:
        made = Daemon()
        made.start()
    except EngineMissing as missing:
        component_missing(str(missing))
    yield made
    made.stop()


@pytest.fixture
def docker(daemon: Daemon) -> Daemon:
    """It runs, without live-restore, and has nothing but images; whatever a test did to it."""
    daemon.restore()
    return daemon
