"""Running things as an ordinary user, also when the suite itself runs as root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT, component_missing

# Where a uid of no account is looked for.
UIDS = range(61_300, 65_000)
SITE_PACKAGES = next(path for path in sys.path if path.endswith("site-packages"))


@dataclass(frozen=True, slots=True)
class User:
    """Somebody without rights: a uid, a home of its own, a Python that can import Capsule."""

    uid: int
    home: Path
    python: str
    env: dict[str, str]

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": 20, **options}
        return subprocess.run(argv, **self._identity(options))

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(argv, **self._identity({"text": True, **options}))

    def capsule(self, *arguments: str) -> tuple[str, ...]:
        """The command line of `capsule …` for this user."""
        return (self.python, "-c", "from capsule.cli.main import main; main()", *arguments)

    def _identity(self, options: dict[str, Any]) -> dict[str, Any]:
        env = {**self.env, **options.pop("env", {})}
        options = {"cwd": self.home, **options, "env": env}
        if os.getuid() == 0:
            options.update(user=self.uid, group=self.uid, extra_groups=[])
        return options


@contextmanager
def ordinary_user(python: str, folders: list[str]) -> Iterator[User]:
    """A user for this test; afterwards neither a process nor a file of it is left."""
    if os.getuid() != 0:
        with _at_home(os.getuid(), python, folders) as user:
            yield user
        return
    with _nobodys_uid() as uid, _at_home(uid, python, folders) as user:
        try:
            yield user
        finally:
            _end_all_of(uid)


@contextmanager
def _nobodys_uid() -> Iterator[int]:
    """A uid that no account has and nobody runs as, ours alone until the end.

    A socket's name is the lock: other suites on this machine look for one in the same way, and a
    test ends every process of its user.
    """
    busy: set[int] = set()
    for entry in _processes():
        with suppress(OSError):
            busy.add(entry.stat().st_uid)
    for uid in UIDS:
        with socket.socket(socket.AF_UNIX) as lock:
            try:
                lock.bind(f"\0capsule-test-uid-{uid}")
            except OSError:
                continue
            if uid not in busy and not _is_account(uid):
                yield uid
                return
    component_missing(f"no free uid from {UIDS.start} on")


def _is_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())


@contextmanager
def _at_home(uid: int, python: str, folders: list[str]) -> Iterator[User]:
    # Not under pytest's own directory, which only root may enter; short, for Unix sockets.
    home = Path(tempfile.mkdtemp(prefix="capsule-user-", dir="/tmp"))
    runtime = home / "run"
    runtime.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(home, uid, uid)
        os.chown(runtime, uid, uid)
    env = {
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(runtime),
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
    }
    try:
        yield User(uid, home, python, env)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def readable_capsule(uid: int = UIDS.start) -> Iterator[tuple[str, list[str]]]:
    """A Python that any user may start, and the folders from which it imports Capsule.

    The suite's own Python may live in root's home, and so may the tree: then another Python of the
    same version does it (the compiled packages fit no other), and copies of the folders.
    """
    folders = [str(ROOT / "src"), str(ROOT / "sdk/python/src"), SITE_PACKAGES]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [sys.executable, "/usr/bin/python3", f"/usr/bin/python{version}"]
    probe = f"import sys; sys.exit('{version}' != '%d.%d' % sys.version_info[:2])"
    python = next((one for one in candidates if _succeeds(uid, [one, "-c", probe], {})), None)
    if python is None:
        component_missing(f"no Python {version} that an ordinary user may start")
    imports = [python, "-c", "import capsule.errors, msgspec"]
    if _succeeds(uid, imports, {"PYTHONPATH": os.pathsep.join(folders)}):
        yield python, folders
        return
    with tempfile.TemporaryDirectory(prefix="capsule-copy-", dir="/tmp") as copy:
        os.chmod(copy, 0o755)
        yield python, _copied(Path(copy), folders)


def _copied(target: Path, folders: list[str]) -> list[str]:
    """The same layout elsewhere: the agent is found relative to the sources."""
    agent = Path("agent/build/capsule-agent")
    names = ["src", "sdk/python/src", "site-packages"]
    for source, name in zip(folders, names, strict=True):
        shutil.copytree(source, target / name, symlinks=True)
    (target / agent.parent).mkdir(parents=True)
    if (ROOT / agent).exists():
        shutil.copy(ROOT / agent, target / agent)
    subprocess.run(["chmod", "-R", "a+rX", str(target)], check=True)
    return [str(target / name) for name in names]


def _succeeds(uid: int, argv: list[str], env: dict[str, str]) -> bool:
    who: dict[str, Any] = {}
    if os.getuid() == 0:
        who = {"user": uid, "group": uid, "extra_groups": []}
    try:
        ended = subprocess.run(argv, env=env, cwd="/", capture_output=True, check=False, **who)
    except OSError:
        return False
    return ended.returncode == 0


def _end_all_of(uid: int) -> None:
    """Kill what still runs as a uid that only this test uses, until nothing does.

    Zombies are somebody's to reap and hold nothing; a bomb may fork between two looks.
    """
    for _ in range(100):
        alive = 0
        for entry in _processes():
            with suppress(OSError):
                if entry.stat().st_uid == uid and not _is_zombie(entry):
                    alive += 1
                    os.kill(int(entry.name), signal.SIGKILL)
        if not alive:
            return


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
