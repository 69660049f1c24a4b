"""Fixtures for all tests, and which tests a run leaves out."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, settings

from tests.support import ROOT, component_missing, components, node_sdks, plan, supervisor
from tests.support import frameworks as agents
from tests.support.engine import Engine, EngineApi, EngineMissing
from tests.support.folders import share_for_the_run
from tests.support.images import Images
from tests.support.layers import prepare
from tests.support.nursery import OWN
from tests.support.servers import RealServer, real_server
from tests.support.users import User, ordinary_user, readable_capsule

# The conformance suite lives in the package; its assertions explain themselves all the same.
pytest.register_assert_rewrite("capsule.testing")

# Whether a machine is slow is not what these tests are about.
settings.register_profile("capsule", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("capsule")


@pytest.fixture(scope="session", autouse=True)
def loop_is_never_blocked() -> Iterator[BlockBuster]:
    """A blocking call of ours inside the event loop is an error, wherever a test causes it.

    Once for all: to do it for each test takes longer than most of them.
    """
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
        # And the one whether templates came or went: a glance at a small folder.
        for name in ("os.scandir", "os.stat"):
            buster.functions[name].can_block_in("capsule/catalog.py", {"_marks"})
            buster.functions[name].can_block_in("capsule/sessions/registry.py", {"_marks"})
        # And the one at the socket of an Engine that does not answer.
        for name in ("os.stat", "os.access"):
            buster.functions[name].can_block_in("capsule/providers/docker/engine.py", {"_refused"})
        # And the ones at limits of our own cgroups: a few small files that are no disk's.
        for name in ("io.TextIOWrapper.read", "io.BufferedReader.read", "os.stat"):
            buster.functions[name].can_block_in("capsule/surroundings.py", {"_read", "_kind"})
        # And the one at an ordinary user's run directory: a server does it before its loop runs.
        for name in ("os.stat", "os.access", "os.getcwd"):
            where = {"_usual_dirs", "may_be", "nearest"}
            buster.functions[name].can_block_in("capsule/config_checks.py", where)
        yield buster


@pytest.fixture(scope="session", autouse=True)
def priority_stays() -> Iterator[None]:
    """A worker that a test has reniced slows down all that it starts afterwards."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


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


@pytest.fixture(scope="session")
def frameworks() -> Path:
    """A Python with what examples for agents are made with; see tests/support/frameworks.py."""
    try:
        return agents.frameworks()
    except agents.FrameworksMissing as missing:
        component_missing(str(missing))


@pytest.fixture(scope="session")
def notebook() -> Path:
    """A folder to import matplotlib and pandas from; see tests/support/frameworks.py."""
    try:
        return agents.notebook()
    except agents.FrameworksMissing as missing:
        component_missing(str(missing))


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """A folder with E2B's packages for Node; see tests/support/node_sdks.py."""
    try:
        return node_sdks.node_sdks()
    except agents.FrameworksMissing as missing:
        component_missing(str(missing))


@pytest.fixture
def as_root() -> None:
    """Stands for the component `root`: without it a run leaves the test out."""


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineApi]:
    """The Docker Engine that this test run shares: leave nothing in it."""
    with engine_needed():
        api = EngineApi(supervisor.acquire().url)
    yield api
    api.close()


@pytest.fixture(scope="session")
def docker_url(engine: EngineApi) -> str:
    """What `DOCKER_HOST` would be."""
    return engine.url


@pytest.fixture(scope="session")
def images(engine: EngineApi) -> Images:
    """Images in the shared Engine: `images.python`, `.node`, `.go`, `.alpine`, `.empty`."""
    with engine_needed():
        prepare()
        return supervisor.acquire().images(engine)


@pytest.fixture(scope="session")
def runsc(engine: EngineApi) -> str:
    """The shared Engine's runtime with gVisor, whose sockets answer outside."""
    return runtime_of(engine, "runsc")


@pytest.fixture(scope="session")
def runsc_nouds(engine: EngineApi) -> str:
    """gVisor as it comes: what is bound inside stays inside."""
    return runtime_of(engine, "runsc-nouds")


@pytest.fixture
def own_docker() -> Iterator[Engine]:
    """A dockerd for this test alone, to be killed and started again. It has no images yet."""
    with engine_needed():
        Engine.can_be_had()
        prepare()
        running = Engine()
        running.start()
    yield running
    running.stop()


def runtime_of(engine: EngineApi, name: str) -> str:
    with engine_needed():
        if name not in engine.runtimes():
            raise EngineMissing(f"the Engine at {engine.url} has no runtime {name}")
    return name


@contextmanager
def engine_needed() -> Iterator[None]:
    """An Engine that does not start skips the test, or fails it in CI."""
    try:
        yield
    except EngineMissing as missing:
        component_missing(str(missing))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """To wait for the Engine, images and frameworks does not count as a test's own time.

    What is missing the fixtures say, when they come to the same point.
    """
    wanted = set(getattr(item, "fixturenames", ()))
    with suppress(agents.FrameworksMissing):
        if "frameworks" in wanted:
            agents.frameworks()
        if "notebook" in wanted:
            agents.notebook()
        if "node_modules" in wanted:
            node_sdks.node_sdks()
    with suppress(EngineMissing):
        if "own_docker" in wanted:
            Engine.can_be_had()
        elif "docker" in needs_of(item):
            supervisor.acquire()
            prepare()
    return (yield)


ENGINES = frozenset({"docker", "dockerd", "podman"})
SLOW = frozenset({"gvisor", "podman", "qemu"})  # a `make test` without CI=true leaves these out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs an Engine, and leave out what this machine cannot run."""
    kept = []
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        needs = needs_of(item)
        if ENGINES & needs:
            item.add_marker(pytest.mark.engine)
        if SLOW & needs:
            item.add_marker(pytest.mark.slow)
        if lacking := components.first_missing(sorted(needs)):
            groups.setdefault(lacking, []).append(item)
        else:
            kept.append(item)
    if groups:
        config.hook.pytest_deselected(items=[item for group in groups.values() for item in group])
    config.stash[LEFT_OUT] = {name: len(group) for name, group in groups.items()}
    items[:] = sorted(kept, key=patience, reverse=True)
    slow = "not slow" not in config.option.markexpr
    plan.write(items, config.stash[LEFT_OUT], slow=slow)


LEFT_OUT = pytest.StashKey[dict[str, int]]()


def needs_of(item: pytest.Item) -> set[str]:
    """What a test states by markers, by fixtures, and by the kind of sandbox it runs in."""
    needs = {name for mark in item.iter_markers("needs") for name in mark.args}
    for fixture in getattr(item, "fixturenames", ()):
        needs.update(components.FIXTURES.get(fixture, ()))
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    cell = parameters.get("cell")
    if isinstance(cell, str) and cell.startswith(("docker", "gvisor")):
        needs.add("docker")
        needs.update({"gvisor"} if cell.startswith("gvisor") else ())
    if isinstance(cell, str) and cell.endswith("-root"):
        needs.add("root")
    return needs


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """For a pytest started by hand; `make test` has its own summary."""
    for name, count in config.stash.get(LEFT_OUT, {}).items():
        component = components.COMPONENTS[name]
        terminalreporter.write_line(
            f"left out: {count} that need {name}: {components.missing(name)}; {component.command}"
        )


def patience(item: pytest.Item) -> int:
    """Those that take minutes come first: otherwise all wait for one that began last."""
    limit = item.get_closest_marker("timeout")
    seconds = limit.args[0] if limit and limit.args else 0
    return seconds if seconds >= 300 else 0


def pytest_collection_finish() -> None:
    """Ten thousand tests are no garbage: nobody has to look through them again and again."""
    gc.collect()
    gc.freeze()


def pass_no_ignored_signals_on() -> None:
    """A run in the background ignores what a terminal sends, and so would all that tests start.

    A handler that does nothing is the same for ourselves, and is not inherited.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    pass_no_ignored_signals_on()
    if shared := share_for_the_run():
        config.add_cleanup(lambda: shutil.rmtree(shared, ignore_errors=True))
    config.add_cleanup(OWN.close)
    if not hasattr(config, "workerinput") and supervisor.own_the_run():
        config.add_cleanup(supervisor.release)
