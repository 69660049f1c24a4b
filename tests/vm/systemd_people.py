"""People and programs in the machine with systemd: who logs in, what a sandbox tries to take."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from capsule_sdk import Capsule, CapsuleClient

HOME = Path("/opt/capsule")
CAPSULE = f"{HOME}/.venv/bin/capsule"
MIB = 1 << 20
LIMITS: dict[str, Any] = {"memory": 256 * MIB, "cpus": 0.5, "processes": 32, "disk": 64 * MIB}
DEV, LONE = 1000, 1001
PATIENCE = 400.0  # seconds: an emulated machine on a busy one is slow. The run has its own end.
BEGUN = time.monotonic()

MEMORY = """
import os, time
r, w = os.pipe()
os.set_blocking(r, False)
children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        kept = b"x" * (200 << 20)
        os.write(w, b".")
        time.sleep(600)
    children.append(pid)
ready, dead = 0, set()
while ready + len(dead) < 8:
    time.sleep(0.1)
    try:
        ready += len(os.read(r, 8))
    except BlockingIOError:
        pass
    for pid in children:
        if pid not in dead and os.waitpid(pid, os.WNOHANG)[0]:
            dead.add(pid)
time.sleep(0.5)
for pid in children:
    if pid not in dead and os.waitpid(pid, os.WNOHANG)[0]:
        dead.add(pid)
print(8 - len(dead), flush=True)
os.kill(0, 9)
"""
CPU = """
import os, time
end = time.monotonic() + 3
for _ in range(4):
    if os.fork() == 0:
        while time.monotonic() < end:
            pass
        os._exit(0)
begun = time.monotonic()
for _ in range(4):
    os.wait()
used = os.times()
print((used.children_user + used.children_system) / (time.monotonic() - begun))
"""
PROCESSES = """
import os, time
count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(600)
        count += 1
except OSError:
    pass
print(count, flush=True)
os.kill(0, 9)
"""
DISK = """
count = 0
try:
    with open("/workspace/big", "wb", buffering=0) as file:
        while count < 100 and file.write(bytes(1 << 20)) == 1 << 20:
            count += 1
except OSError:
    pass
import os
os.unlink("/workspace/big")
print(count)
"""


def say(line: str) -> None:
    print(f"[{time.monotonic() - BEGUN:6.1f}] {line}", flush=True)


class Login:
    """A session as /bin/login makes one, on a terminal of its own."""

    def __init__(self, user: str) -> None:
        self.screen, self._over = b"", False
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.execv("/bin/login", ["login", "-f", user])
        threading.Thread(target=self._read, daemon=True).start()
        self._count = 0
        # login forgets what was typed before its shell is there.
        self._wait(
            lambda: self.screen.rstrip().endswith((b"$", b"#")), PATIENCE, f"a shell of {user}"
        )
        self.run("PS1=")

    def _read(self) -> None:
        while not self._over:
            try:
                self.screen += os.read(self._terminal, 4096)
            except OSError:  # login hangs up before it begins, so that nobody else reads
                time.sleep(0.05)

    def _wait(self, what: Callable[[], object], timeout: float, why: str) -> None:
        try:
            wait(what, timeout, why)
        except AssertionError as error:
            raise AssertionError(f"{error}; on the screen: {self.screen!r}") from None

    def run(self, line: str, timeout: float = PATIENCE) -> str:
        """What a line that was typed prints."""
        self._count += 1
        begin, end = f"<{self._count}-", f"-{self._count}>"
        # The marks are cut in two where they are typed, so that an echo is none.
        typed = f"echo '<'{self._count}-; {line}\necho -{self._count}'>'\n"
        os.write(self._terminal, typed.encode())
        self._wait(lambda: end in self.screen.decode(errors="replace"), timeout, line)
        return self.screen.decode(errors="replace").rpartition(begin)[2].partition(end)[0].strip()

    def logout(self) -> None:
        os.write(self._terminal, b"exit\n")
        os.waitpid(self._pid, 0)
        self._over = True


def wait(what: Callable[[], object], timeout: float, why: str) -> None:
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end, f"not within {timeout:g} s: {why}"
        time.sleep(0.1)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def servers() -> dict[str, int]:
    """Port → process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if "python3" in words[0] and words[1:3] == [CAPSULE, "serve"]:
                found["".join(words[4:5])] = int(path.parent.name)
    return found


def server(port: int) -> int:
    """The process of the server at this port; 0: there is none."""
    return servers().get(str(port), 0)


def end(port: int, how: signal.Signals = signal.SIGTERM) -> None:
    """The server's end, not its sandboxes'."""
    pid = server(port)
    assert pid, f"no server at {port}"
    os.kill(pid, how)
    wait(lambda: not server(port), PATIENCE, f"the end of the server at {port}")


def client(port: int) -> CapsuleClient:
    wait(lambda: healthy(port), PATIENCE, f"a server at {port}")
    return CapsuleClient(f"http://127.0.0.1:{port}")


def serve(port: int) -> str:
    return f"{CAPSULE} serve --port {port}"


def as_user(uid: int, *command: str) -> list[str]:
    """As cron would: no session, no environment."""
    home = "/home/dev" if uid == DEV else "/home/lone"
    environment = ["env", "-i", f"HOME={home}", "PATH=/usr/bin:/bin"]
    drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return [*drop, *environment, *command]


def measure(box: Capsule) -> dict[str, float]:
    found = {}
    for name, code in (("memory", MEMORY), ("cpus", CPU), ("processes", PROCESSES), ("disk", DISK)):
        done = box.exec(["python3", "-c", code], timeout=PATIENCE)
        assert done.stdout, (name, done)
        found[name] = float(done.stdout)
    return found


def held(found: dict[str, float]) -> dict[str, bool]:
    return {
        "memory": found["memory"] <= 1,
        "cpus": found["cpus"] <= 0.65,
        "processes": found["processes"] <= LIMITS["processes"],
        "disk": found["disk"] <= 64,
    }


def cgroup(box: Capsule) -> str:
    """Where the kernel counts what the sandbox runs."""
    (found,) = Path("/sys/fs/cgroup").rglob(f"{box.id}-*/memory.max")
    return f"/{found.parent.parent.relative_to('/sys/fs/cgroup')}"
