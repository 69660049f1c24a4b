"""Fixtures for all tests, and the summary of what was skipped and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, settings

from tests.support import ROOT, component_missing
from tests.support.servers import RealServer, real_server
from tests.support.users import User, ordinary_user, readable_capsule

# The conformance suite lives in the package; its assertions explain themselves all the same.
pytest.register_assert_rewrite("capsule.testing")

# Whether a machine is slow is not what these tests are about.
settings.register_profile("capsule", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("capsule")


@pytest.fixture(autouse=True)
def loop_is_never_blocked() -> Iterator[BlockBuster]:
    """A blocking call of ours inside the event loop is an error, wherever a test causes it."""
    with blockbuster_ctx("capsule") as buster:
        # The store is written on the loop on purpose: WAL without fsync takes microseconds,
        # a thread hop takes longer.
        for name, function in buster.functions.items():
            if name.startswith("sqlite3."):
                function.deactivate()
        # So is a box's record: one small file on a tmpfs, before anything of the box exists.
        for name in ("os.mkdir", "os.replace"):
            buster.functions[name].can_block_in(
                "capsule/providers/local/records.py", {"create", "_write"}
            )
        # And the look whether a template's programs are there: microseconds of lookups in /usr/bin.
        for name in ("os.path.abspath", "os.readlink"):
            buster.functions[name].can_block_in("capsule/providers/local/programs.py", {"_on_host"})
        yield buster


@pytest.fixture(scope="session")
def agent_binary() -> Path:
    path = Path(os.environ.get("CAPSULE_AGENT", ROOT / "agent/build/capsule-agent"))
    if not os.access(path, os.X_OK):
        component_missing(f"the agent is not built: {path} (make agent)")
    return path


@pytest.fixture(scope="session")
def asan_agent() -> Path:
    """The agent with AddressSanitizer and UBSan."""
    path = ROOT / "agent/build/asan/capsule-agent"
    if not os.access(path, os.X_OK):
        component_missing(f"the sanitized agent is not built: {path} (make agent-asan)")
    return path


@pytest.fixture(scope="session")
def capsule_for_all() -> Iterator[tuple[str, list[str]]]:
    """A Python, and folders to import Capsule from, that every user of this machine may use."""
    with readable_capsule() as found:
        yield found


@pytest.fixture
def as_user(capsule_for_all: tuple[str, list[str]]) -> Iterator[User]:
    """Somebody without rights to run commands as; see tests/support/users.py."""
    with ordinary_user(*capsule_for_all) as user:
        yield user


@pytest.fixture(scope="session")
def server(agent_binary: Path) -> Iterator[RealServer]:
    """A real server on this host, shared by the tests of a worker: leave nothing in it."""
    with real_server() as running:
        yield running


@pytest.fixture
def as_root() -> None:
    """Asking for it skips the test when the suite does not run as root."""
    if os.getuid() != 0:
        pytest.skip("needs root, the suite runs as an ordinary user")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect reasons for the one list at the end of `make test` (see scripts/test)."""
    target = os.environ.get("CAPSULE_TEST_SKIPS")
    if not target or not report.skipped or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if hasattr(report, "wasxfail"):
        reason = f"expected failure: {report.wasxfail or report.nodeid}"
    else:
        assert isinstance(report.longrepr, tuple)
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    with open(target, "a", encoding="utf-8") as file:
        file.write(reason.replace("\n", " ") + "\n")
