"""Timeouts: live on when the exec has ended. After a timeout or a kill nobody of it is left."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.escape.attempt import ALONE, Attempt, cases, proofs, scenario
from tests.escape.conftest import Cell
from tests.escape.machine import Refused, Sandbox, running_with
from tests.support import wait_for
from tests.support.users import User

pytestmark = pytest.mark.real

MAIN = "it has no descendants: to kill the process group ends it"

ATTEMPTS = [
    Attempt("daemon", "fork twice, with a session of one's own", proof=ALONE),
    Attempt("unkillable", "ignore and block every signal", proof=ALONE),
    Attempt("unkillable-main", "the same in the program itself", proof=MAIN),
    Attempt("stopping", "be stopped most of the time", proof=ALONE),
    Attempt("stopping-main", "the same in the program itself", proof=MAIN),
    Attempt("vfork", "in a child of vfork, whose parent is suspended", proof=ALONE),
    Attempt("no-leader", "end one's first thread: the process looks dead", proof=ALONE),
    Attempt("no-leader-main", "the same in the program itself", proof=MAIN),
    Attempt("hopping", "go on in a new process every few microseconds", proof=ALONE),
    Attempt("sibling", "be a child of one's parent (CLONE_PARENT)", proof=ALONE),
    Attempt("subreaper", "adopt one's own orphans", proof=ALONE),
    Attempt("chain", "twenty sessions deep", proof=ALONE),
    Attempt("hydra", "be twenty-four who replace whoever dies", proof=ALONE),
    Attempt("disguised", "without name, arguments, descriptors, as a kernel thread", proof=ALONE),
    Attempt("unreadable", "execute a file that nobody may read (mode 0111)", proof=ALONE),
]


def _install(sandbox: Sandbox, helpers: Path) -> None:
    sandbox.put(helpers / "evade", "evade")
    sandbox.put(helpers / "evade", "hidden", mode=0o111)


BEAT = "/workspace/beat"


def _beats(sandbox: Sandbox, path: str = BEAT) -> str:
    """What was written last; nothing before the first beat."""
    try:
        return sandbox.read(path)
    except Refused:
        return ""


def _ends(sandbox: Sandbox, path: str = BEAT) -> None:
    """The heart stands still; it is read twice, some beats apart."""
    last = _beats(sandbox, path)
    wait_for(lambda: _slept(sandbox), what="a process to be had")
    assert last, "it never began"
    assert _beats(sandbox, path) == last, "somebody lives on"


def _slept(sandbox: Sandbox) -> bool:
    """False: others in it leave no process for it, at the moment."""
    try:
        return bool(sandbox.exec("/bin/sleep", "0.06"))
    except Refused as refused:
        assert refused.kind == "CapacityError"
        return False


@cases(ATTEMPTS)
def test_nobody_outlives_a_timeout(attempt: Attempt, cell: Cell, helpers: Path) -> None:
    with cell.box(processes=40) as sandbox:
        _install(sandbox, helpers)
        ended = sandbox.exec("./evade", attempt.name, "6", timeout=0.25)
        assert ended["reason"] == "timed_out"
        assert ended["duration_ms"] < 5000
        _ends(sandbox)


@pytest.mark.parametrize("how", [a.name for a in ATTEMPTS if not a.name.endswith("-main")])
@pytest.mark.parametrize("cell", ["namespaces-root", "landlock-user"], indirect=True)
def test_nobody_outlives_a_kill(how: str, cell: Cell, helpers: Path) -> None:
    with cell.box(processes=40) as sandbox:
        _install(sandbox, helpers)
        running = sandbox.send("./evade", how, "6", id="it", timeout=10.0)
        wait_for(lambda: _beats(sandbox), what="its first beat")
        sandbox.ask("kill", "it")
        assert cell.driver.wait(running)["reason"] == "cancelled"
        _ends(sandbox)


@scenario(
    "background",
    "stay in the background after a normal exit, until the exec or the sandbox is ended",
    proof="it is meant to: only a kill of the finished exec ends it",
)
def test_a_finished_exec_can_still_be_killed(cell: Cell, helpers: Path) -> None:
    with cell.box() as sandbox:
        _install(sandbox, helpers)
        script = "./evade daemon 6 & while [ ! -s beat ]; do sleep 0.01; done"
        ended = sandbox.exec("/bin/sh", "-c", script, id="it", timeout=5.0)
        assert ended["reason"] == "exited", "output that the daemon holds open delays no exit"
        sandbox.ask("kill", "it")
        _ends(sandbox)


@scenario(
    "amid-births",
    "hide from a kill among processes of another exec that are born all the time",
    proof="see hopping",
)
def test_a_kill_ends_beside_others_that_fork(cell: Cell, helpers: Path) -> None:
    with cell.box() as sandbox:
        sandbox.put(helpers / "evade", "evade")
        for name in ("one", "other"):
            _start_hopping(sandbox, name)
        sandbox.ask("kill", "one")
        _ends(sandbox, "/workspace/one/beat")
        last = _beats(sandbox, "/workspace/other/beat")
        wait_for(lambda: _beats(sandbox, "/workspace/other/beat") != last, what="the other lives")
        sandbox.write("/workspace/other/stop")


def _hops(sandbox: Sandbox, name: str, folder: str) -> bool:
    """False: those that hop already leave no process to start it, at the moment."""
    try:
        sandbox.ask("start", ["../evade", "hopping", "9"], name, timeout=0.0, cwd=folder)
    except Refused as refusal:
        assert refusal.kind == "CapacityError"
        return False
    return True


def _start_hopping(sandbox: Sandbox, name: str) -> None:
    folder = f"/workspace/{name}"
    sandbox.ask("call", "mkdir", folder)
    wait_for(lambda: _hops(sandbox, name, folder), what="there is room for one more")
    wait_for(lambda: _beats(sandbox, f"{folder}/beat"), what="its first beat")


@scenario(
    "outlive-delete",
    "live on when the sandbox is deleted",
    proof="see daemon",
)
def test_nobody_outlives_the_sandbox(cell: Cell, helpers: Path) -> None:
    with cell.box(fresh=True, processes=200) as sandbox:
        _install(sandbox, helpers)
        mark = f"9.{secrets.randbelow(10**9)}"  # an argument that nobody else has
        for number, how in enumerate(("no-leader", "hopping", "hydra", "unreadable", "stopping")):
            sandbox.ask("start", ["./evade", how, mark], f"it{number}", timeout=0.0)
        wait_for(lambda: _beats(sandbox), what="its first beat")
        assert sandbox.running(mark), "the test looks at the right processes"
        sandbox.destroy()
    assert not sandbox.running(mark), "no process of the sandbox is left"


@proofs(ATTEMPTS)
def test_works_outside(attempt: Attempt, peer: User, folder: Path, helpers: Path) -> None:
    """To kill the process group, as `timeout` and most runners do, does not end it."""
    home = folder / "home"
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    for name, mode in (("evade", 0o755), ("hidden", 0o111)):
        shutil.copy(helpers / "evade", home / name)
        (home / name).chmod(mode)
    mark = f"6.{secrets.randbelow(10**9)}"
    with _started(peer, home, attempt.name, mark) as process:
        wait_for(lambda: _heart(home), what="its first beat")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)
        last = _heart(home)
        wait_for(lambda: _heart(home) != last, what="it lives on", within=3)
        (home / "stop").touch()
        wait_for(lambda: not running_with(mark), what="it ends when it is told to")


def _started(peer: User, home: Path, how: str, seconds: str) -> subprocess.Popen[str]:
    nothing: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    slowly = {"SLOWLY": "1"}
    options = {"cwd": home, "env": slowly, "start_new_session": True, **nothing}
    return peer.popen("./evade", how, seconds, **options)


def _heart(home: Path) -> bytes:
    beat = home / "beat"
    return beat.read_bytes() if beat.exists() else b""
