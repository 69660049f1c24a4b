"""The test's end of the driver, and running programs without any sandbox."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.users import User

ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
}
SERVER_SECRET = "CAPSULE_ESCAPE_SECRET"
DRIVER = Path(__file__).with_name("driver.py")
LIMITS = {"memory": 256 << 20, "disk": 64 << 20, "inodes": 2000, "processes": 64, "open_files": 256}


def system_python() -> str:
    """The one that programs find inside, so that both runs use the same."""
    found = shutil.which("python3", path=ENV["PATH"])
    assert found is not None, "no python3 below /usr, where sandboxes look for it"
    return found


class Refused(Exception):
    """An error of Capsule's, as the driver tells it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class NoAnswer(AssertionError):
    """The driver, or the agent that it asks, takes too long."""


class Driver:
    """driver.py in a process of its own, as root or as somebody else."""

    def __init__(self, process: subprocess.Popen[str], user: User) -> None:
        self._process = process
        self._numbers = count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._left = b""
        self._names = count(1)
        self._spare: dict[tuple[Any, ...], list[Sandbox]] = {}
        self.pid = process.pid
        self.user = user  # whose processes and files are worth an attack from inside

    def send(self, op: str, *arguments: Any, **options: Any) -> int:
        number = next(self._numbers)
        request = {"n": number, "op": op, "arguments": arguments, **options}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return number

    def wait(self, number: int, within: float = 18.0) -> dict[str, Any]:
        deadline = time.monotonic() + within
        while number not in self._answers:
            self._read(deadline)
        answer = self._answers.pop(number)
        assert not answer.pop("broken", False), answer
        if "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer

    def ask(self, op: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        return self.wait(self.send(op, *arguments, **options))

    def _read(self, deadline: float) -> None:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise NoAnswer("the driver does not answer")
        self._left += (data := os.read(pipe, 1 << 20))
        assert data, "the driver is gone"
        *lines, self._left = self._left.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._answers[answer.pop("n")] = answer

    @contextmanager
    def box(
        self, level: str, *, shared: bool = False, image: str = "", **limits: Any
    ) -> Iterator[Sandbox]:
        """A sandbox of one's own, or one that others had before and left as it was.

        That its agent still answers is known of the second kind when it is tidied.
        """
        kind = (level, *sorted(limits.items()))
        spare = self._spare.setdefault(kind, [])
        sandbox = spare.pop() if shared and spare else self._create(level, image, limits)
        try:
            yield sandbox
            if shared and not sandbox.destroyed and (again := self._tidy(sandbox)):
                spare.append(again)
        finally:
            if not sandbox.destroyed:
                sandbox.destroy()

    def _create(self, level: str, image: str, limits: dict[str, Any]) -> Sandbox:
        name = f"x{next(self._names)}"
        handle = self.ask("create", level, name, {**LIMITS, **limits}, image=image)
        return Sandbox(self, name, handle)

    def _tidy(self, sandbox: Sandbox) -> Sandbox | None:
        """The same with a name that nobody knows yet; None: not everything could be removed."""
        name = f"x{next(self._names)}"
        told = self.ask("tidy", sandbox.name, name)
        again, sandbox.name = Sandbox(self, name, sandbox.handle), name
        sandbox.destroyed = bool(told["clean"])
        return again if told["clean"] else None

    def close(self) -> None:
        """Its sandboxes end first. That takes a while if they are containers, of a worker's whole
        run, and is not for the time of the test that happened to be the last."""
        assert self._process.stdin is not None and self._process.stdout is not None
        signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's
        self._process.stdin.close()
        try:
            self._process.wait(120)
        finally:
            self._process.kill()
            self._process.stdout.close()


@dataclass
class Sandbox:
    driver: Driver
    name: str
    handle: dict[str, Any]  # keeper, disk_dir, cgroups, unenforced …
    destroyed: bool = False
    _ids: Iterator[int] = field(default_factory=lambda: count(1))

    def ask(self, op: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        return self.driver.ask(op, self.name, *arguments, **options)

    def exec(self, *argv: str, **options: Any) -> dict[str, Any]:
        return self.driver.wait(self.send(*argv, **options))

    def send(self, *argv: str, **options: Any) -> int:
        """Starts an exec without waiting for its end, which `driver.wait` tells."""
        env = {**ENV, **options.pop("env", {})}
        id = options.pop("id", None) or f"e{next(self._ids)}"
        return self.driver.send("exec", self.name, list(argv), id, env=env, **options)

    def put(self, path: Path, name: str, mode: int = 0o755) -> None:
        data = base64.b64encode(path.read_bytes()).decode()
        self.ask("write", f"/workspace/{name}", data, mode=mode)

    def write(self, path: str, text: str = "", **options: Any) -> None:
        self.ask("write", path, base64.b64encode(text.encode()).decode(), **options)

    def read(self, path: str) -> str:
        return str(self.ask("read", path)["data"])

    def running(self, mark: str) -> list[str]:
        """Threads of the host with this argument; gVisor's own, which has its programs inside."""
        if self.handle["isolation"] != "gvisor":
            return running_with(mark)
        return sorted({pid for group in self.handle["cgroups"] for pid in _members(group)})

    def answers(self) -> bool:
        try:
            self.ask("call", "ping")
            return bool(self.exec("/bin/echo", "alive")["out"] == "alive\n")
        except Refused:
            return False

    def destroy(self) -> None:
        self.destroyed = True
        self.ask("destroy")


@contextmanager
def driver_of(user: User | None, nearby: User, agent: Path) -> Iterator[Driver]:
    """A driver as `user`, or as root. `nearby` is whom its sandboxes are to attack."""
    source = DRIVER.read_text("utf-8")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    more = {SERVER_SECRET: "the server's own secret", "CAPSULE_AGENT": str(agent)}
    folder = Path(tempfile.mkdtemp(prefix="ce-", dir="/tmp"))
    folder.chmod(0o711)
    with open(folder / "log", "w") as log, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        pipes["stderr"] = log
        if user is None:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            env = {**os.environ, **more, "PYTHONPATH": path}
            command = [sys.executable, "-c", source, str(folder)]
            process: subprocess.Popen[str] = subprocess.Popen(command, env=env, **pipes)
        else:
            if os.getuid() == 0:
                os.chown(folder, user.uid, user.uid)
            process = user.popen(user.python, "-c", source, str(folder), env=more, **pipes)
        driver = Driver(process, nearby)
        stack.callback(driver.close)
        yield driver


@dataclass(frozen=True)
class Ended:
    output: str
    signal: int


def run_unconfined(argv: list[str], user: User | None, folder: Path, *, tty: bool) -> Ended:
    """As `user`, or as root; in a session of its own, with a terminal if asked for."""
    env = {**ENV, "HOME": str(folder), "TMPDIR": str(folder)}
    options: dict[str, Any] = {"cwd": folder, "start_new_session": True, "env": env}
    if user is not None and os.getuid() == 0:
        options.update(user=user.uid, group=user.uid, extra_groups=[])
    if tty:
        return _run_on_terminal(argv, options)
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=15, **options)
    return Ended(ended.stdout + ended.stderr, max(0, -ended.returncode))


def _run_on_terminal(argv: list[str], options: dict[str, Any]) -> Ended:
    # The terminal is taken by a shell in between: Popen has no hook that is safe for it.
    master, slave = pty.openpty()
    try:
        os.fchmod(slave, 0o666)
        taking = f"import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {_EXEC}"
        with subprocess.Popen(
            [argv[0], "-c", taking, *argv], stdin=slave, stdout=slave, stderr=slave, **options
        ) as process:
            os.close(slave)
            output = _read_all(master)
            return Ended(output.replace("\r\n", "\n"), max(0, -process.wait(15)))
    finally:
        os.close(master)


_EXEC = "os.execv(sys.argv[1], sys.argv[1:])"


def _read_all(fd: int) -> str:
    data = b""
    with suppress(OSError):  # EIO: the last holder of the other end left
        while chunk := os.read(fd, 1 << 16):
            data += chunk
    return data.decode("utf-8", "replace")


def running_with(mark: str) -> list[str]:
    """Threads of the host with this argument: a process without its first thread shows no other."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                found += [task.name for task in (entry / "task").iterdir() if _has(task, mark)]
    return found


def _members(cgroup: str) -> list[str]:
    try:
        return Path(cgroup, "cgroup.procs").read_text().split()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # or removed while it is read
            raise
        return []


def _has(task: Path, mark: str) -> bool:
    with suppress(OSError):
        return mark.encode() in (task / "cmdline").read_bytes()
    return False
