"""Folders for the conformance suite's boxes, and which of its tests run alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# These measure time, or fill a machine on purpose: nothing else should run beside them.
ALONE = ("TestStress", "test_cpus")

# Kinds of box that differ from others in some tests only; the rest runs with CI=true. E2B's double
# is a relay to the same agent, and `landlock` the same agent with other ways to files, ports, root
# and the end of programs.
DIFFERS = {
    "test_e2b.py": (
        "TestLifecycle", "TestAdoption", "TestReadAndWrite", "TestOddFiles", "TestFullDisk",
        "TestDial", "TestListen", "TestLimits", "TestRoot", "TestKill",
    ),
    "landlock": (
        "TestLifecycle", "TestAtomicity", "TestOddFiles", "TestFullDisk", "TestLinks", "TestDial",
        "TestListen", "TestLimits", "TestRoot", "TestKill", "TestBackground",
    ),
    "test_relayed.py": ("",),
    "runc-engine": (),
}  # fmt: skip
# Of these kinds not even the tests that run alone.
SHARED = ("test_e2b.py", "test_relayed.py")

# Through the Engine run the tests that depend on the stream. Behind it is the same agent in the
# same container, which is tried by its socket.
THROUGH_THE_ENGINE = (
    "TestAdoption", "TestAttach", "TestConnections", "TestDial", "TestInput", "TestLifecycle",
    "TestListen", "TestOutput", "TestReadAndWrite", "TestStress", "TestTerminal", "TestWatch",
)  # fmt: skip

# Where files are copied instead of being a layer, only the tests of state that this could break.
COPIED = (
    "begins", "changed", "odd_files", "one_moment", "stays_paused", "outlive", "is_its_own",
    "undo_goes_back", "cancelled", "archive", "volume", "read_only", "is_shared",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/contract/" not in item.nodeid:
            continue
        if any(name in item.nodeid for name in ALONE):
            item.add_marker(pytest.mark.serial)
        if _is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
    left_out = [item for item in items if _is_left_out(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _is_left_out(item.nodeid)]


def _is_slow(name: str) -> bool:
    if "test_docker_state.py" in name:
        return "test_a_long_chain" in name or "runc-engine" in name
    if any(kind in name for kind in SHARED) and any(each in name for each in ALONE):
        return True
    kinds = [names for kind, names in DIFFERS.items() if kind in name]
    return "::Test" in name and not all(any(each in name for each in some) for some in kinds)


def _is_left_out(name: str) -> bool:
    if "test_docker_state.py" in name and "runc-socket-loop" not in name:
        some = COPIED[:3] if "runsc-socket-memory" in name else COPIED
        return not any(part in name for part in some)
    if "test_docker.py" not in name or "-engine" not in name:
        return False
    return not any(f"::{one}::" in name for one in THROUGH_THE_ENGINE)


@pytest.fixture(scope="session")
def data_dir() -> Iterator[Path]:
    """Shared: making the first disk image takes longer than most of the tests."""
    with folder() as path:
        yield path


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with folder() as path:
        yield path
        log = path / "launcher" / "log"  # the agent says nothing there; a sanitizer does
        assert not log.exists() or log.read_text() == ""


@contextmanager
def folder() -> Iterator[Path]:
    """Short, for Unix sockets, and open to the users that boxes run as."""
    path = Path(tempfile.mkdtemp(prefix="cap-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)
