"""Drivers and users for the attempts, and the two ways to run an attempt."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from capsule.providers.local.syscalls import numbers
from tests.escape.actors import ACTORS, Acting, Scene
from tests.escape.attempt import LOCAL, RELAYED, ROOT, Attempt, Check, GotOut, Verdict, verdict
from tests.escape.machine import (
    Driver,
    NoAnswer,
    Refused,
    Sandbox,
    driver_of,
    run_unconfined,
    system_python,
)
from tests.support.images import Images
from tests.support.users import User, ordinary_user

GONE = "UnavailableError"  # what a client gets from a box that has ended
SOURCES = Path(__file__).with_name("c")


@dataclass(frozen=True)
class Cell:
    """A kind of sandbox: what makes it, and who runs the server."""

    name: str
    level: str
    who: str
    driver: Driver

    @property
    def container(self) -> bool:
        return self.name not in LOCAL

    @property
    def gvisor(self) -> bool:
        return self.name.startswith("gvisor")

    def scene(self, folder: Path, sandbox: Sandbox) -> Scene:
        return Scene(folder, self.driver.user, sandbox, self.level, self.container)

    def box(self, *, fresh: bool = False, **options: Any) -> AbstractContextManager[Sandbox]:
        """A container takes a while to make: attempts share it, unless they ask for a fresh one."""
        return self.driver.box(self.level, shared=self.container and not fresh, **options)


@pytest.fixture(scope="session")
def peer(capsule_for_all: tuple[str, list[str]]) -> Iterator[User]:
    """An ordinary user of the host with no other processes (unless it is the suite's own)."""
    with ordinary_user(*capsule_for_all) as user:
        yield user


@pytest.fixture(scope="session")
def user_driver(capsule_for_all: tuple[str, list[str]], agent_binary: Path) -> Iterator[Driver]:
    with ordinary_user(*capsule_for_all) as user:
        with driver_of(user, user, agent_for_all(agent_binary, user)) as driver:
            yield driver


@pytest.fixture(scope="session")
def root_driver(peer: User, agent_binary: Path) -> Iterator[Driver]:
    with driver_of(None, peer, agent_binary) as driver:
        yield driver


def agent_for_all(agent: Path, user: User) -> Path:
    """The suite's tree may be closed to others."""
    copy = user.home / "capsule-agent"
    shutil.copy(agent, copy)
    copy.chmod(0o755)
    return copy


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    if request.param not in LOCAL:
        return _container_cell(request.param, request)
    level, who = request.param.split("-")
    driver: Driver = request.getfixturevalue(f"{who}_driver")
    try:
        driver.ask("open", level)
    except Refused as refusal:
        pytest.skip(f"no level {level} here: {refusal}")
    return Cell(request.param, level, who, driver)


def _container_cell(name: str, request: pytest.FixtureRequest) -> Cell:
    images: Images = request.getfixturevalue("images")
    url: str = request.getfixturevalue("docker_url")
    gvisor = name.startswith("gvisor")
    runtime = request.getfixturevalue("runsc") if gvisor else "runc"
    who = "root" if os.getuid() == 0 else "user"
    driver: Driver = request.getfixturevalue(f"{who}_driver")
    way = "engine" if name in RELAYED else "auto"
    driver.ask("open", name, image=images.python, host=url, runtime=runtime, transport=way)
    return Cell(name, name, who, driver)


@pytest.fixture(scope="session")
def helpers() -> Iterator[Path]:
    """The programs of c/, compiled; any user may read them."""
    folder = Path(tempfile.mkdtemp(prefix="ce-c-", dir="/tmp"))
    folder.chmod(0o755)
    for source in sorted(SOURCES.glob("*.c")):
        command = ["cc", "-O1", "-w", "-pthread", "-o", str(folder / source.stem), str(source)]
        static = subprocess.run([*command, "-static"], capture_output=True, check=False)
        if static.returncode:
            subprocess.run(command, check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    """On the host, open to all users: the files that attempts want are here."""
    path = Path(tempfile.mkdtemp(prefix="ce-host-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def acting(names: tuple[str, ...], scene: Scene) -> Iterator[list[Acting]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ACTORS[name](scene)) for name in names]


def _arguments(attempt: Attempt, actors: list[Acting], **more: object) -> str:
    known = numbers(platform.machine())
    args: dict[str, object] = {
        "nr": {name: known[name] for name in attempt.names() if name in known},
        "machine": platform.machine(),
        **attempt.args,
        **more,
    }
    for actor in actors:
        args |= actor.args
    return json.dumps(args)


def _judge(attempt: Attempt, output: str, signal: int, actors: list[Acting]) -> Verdict:
    said = verdict(output, signal=signal, killed=attempt.killed)
    found = [evidence for actor in actors if (evidence := actor.evidence(output))]
    return Verdict("ESCAPED", f"{found[0]}; it says: {said.what}") if found else said


Try = Callable[[Attempt], Verdict]


@pytest.fixture
def inside(cell: Cell, folder: Path, request: pytest.FixtureRequest) -> Try:
    """Runs an attempt in a sandbox."""

    def run(attempt: Attempt) -> Verdict:
        with cell.box(fresh=attempt.fresh) as sandbox:
            if cell.name in attempt.stands and attempt.unenforced in sandbox.handle["unenforced"]:
                request.applymarker(_not_enforced(attempt, cell, sandbox))
            scene = cell.scene(folder, sandbox)
            with acting(attempt.actors, scene) as actors:
                keeper = sandbox.handle["keeper"]
                args = _arguments(attempt, actors, keeper=keeper, gvisor=cell.gvisor)
                argv = ["python3", "-c", attempt.program(), args]
                if cell.name in attempt.fatal:
                    return _last_attempt(attempt, sandbox, argv)
                who = {"user": attempt.user, "cwd": "/workspace"} if attempt.user else {}
                ended = sandbox.exec(*argv, tty=attempt.terminal == "both", **who)
                output = (ended["out"] + ended["err"]).replace("\r\n", "\n")
                found = _judge(attempt, output, ended["signal"], actors)
            if not cell.container:
                assert sandbox.answers(), "the agent answers no more"
            return found

    return run


def _last_attempt(attempt: Attempt, sandbox: Sandbox, argv: list[str]) -> Verdict:
    """The sandbox may end with it, or hang; but it must be possible to get rid of it."""
    try:
        ended = sandbox.driver.wait(sandbox.send(*argv), within=8)
        found = _judge(attempt, ended["out"], ended["signal"] or ended["exit_code"], [])
    except NoAnswer:
        found = Verdict("BLOCKED", "the whole sandbox hangs")
    except Refused as refusal:
        assert refusal.kind == GONE
        found = Verdict("BLOCKED", "the whole sandbox ended")
    sandbox.destroy()
    return found


def _not_enforced(attempt: Attempt, cell: Cell, sandbox: Sandbox) -> pytest.MarkDecorator:
    """Memory may be limited together with the disk, which is listed and may hold all the same."""
    strict = attempt.unenforced != "memory" or not sandbox.handle["cgroups"]
    return pytest.mark.xfail(reason=attempt.stands[cell.name], strict=strict, raises=GotOut)


@pytest.fixture
def unconfined(peer: User, folder: Path) -> Try:
    """Runs an attempt without a sandbox, as the user who must be able to do it."""

    def run(attempt: Attempt) -> Verdict:
        user = None if attempt.proof == ROOT else peer
        home = folder / "home"
        home.mkdir()
        if user is not None and os.getuid() == 0:
            os.chown(home, user.uid, user.uid)
        with acting(attempt.actors, Scene(folder, peer, None)) as actors:
            argv = [system_python(), "-c", attempt.program(), _arguments(attempt, actors)]
            ended = run_unconfined(argv, user, home, tty=bool(attempt.terminal))
            return _judge(attempt, ended.output, ended.signal, actors)

    return run


@pytest.fixture
def holds(inside: Try) -> Check:
    """Fails if the attempt gets out, or says nothing."""

    def check(attempt: Attempt) -> None:
        found = inside(attempt)
        if found.got_out:
            raise GotOut(found.what)
        assert found.word in ("BLOCKED", "ABSENT"), f"it does not say what happened: {found.what}"

    return check


@pytest.fixture
def works(unconfined: Try) -> Check:
    """Fails if the attempt does not succeed even without a sandbox."""

    def check(attempt: Attempt) -> None:
        found = unconfined(attempt)
        refused = attempt.hardened and found.word == "BLOCKED"
        if found.word == "ABSENT" or refused or "[Errno 38]" in found.what:
            pytest.skip(f"{attempt.name}: not on this machine: {found.what}")
        assert found.got_out, f"it proves nothing: {found.what}"

    return check
