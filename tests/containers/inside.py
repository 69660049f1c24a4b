"""Runs in a container: what `doctor` says of it, and what a server there can do, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from capsule_sdk import CapsuleClient, CapsuleError

CAPSULE = (sys.executable, "-c", "from capsule.cli.main import main; main()")
MARK = "77771"  # seconds that programs sleep: nobody else does so long
URL = "http://127.0.0.1:8080"


def doctor() -> dict[str, Any]:
    said = subprocess.run([*CAPSULE, "doctor", "--json"], capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(said.stdout)
    except ValueError:
        return {"failed": said.stdout + said.stderr}
    return found


def alive() -> list[str]:
    """Processes with the mark; what is dead and waits for its parent is nobody."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if MARK.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
    return found


BOMB = """
import os, time
for _ in range(1000):
    try:
        if os.fork() == 0: time.sleep(60); os._exit(0)
    except OSError:
        time.sleep(0.01)
"""


def crowd(client: CapsuleClient) -> dict[str, Any]:
    """One sandbox takes all processes that the container may have: what another one is told."""
    bomber, other = client.create("python"), client.create("python")
    bomber.start(["python3", "-c", BOMB], timeout=30)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            other.exec(["true"])
        except CapsuleError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    return {"refused": "nothing"}


def begun(within: float) -> bool:
    deadline = time.monotonic() + within
    while not (found := alive()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)


def gone(within: float) -> list[str]:
    deadline = time.monotonic() + within
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def use(client: CapsuleClient) -> dict[str, Any]:
    """Create, exec, a timeout, a delete with something that runs: what became of each."""
    start = time.monotonic()
    sandbox = client.create("python")
    done: dict[str, Any] = {
        "isolation": sandbox.info.isolation,
        "unenforced": [each.what for each in sandbox.info.unenforced],
        "create": round(time.monotonic() - start, 3),
        "said": sandbox.exec(["python3", "-c", "print(6 * 7)"]).stdout.strip(),
    }
    ended = sandbox.exec(["sleep", MARK], timeout=0.5)
    done["timeout"] = {"reason": ended.reason, "ms": ended.duration_ms, "left": gone(2)}
    sandbox.start(["sh", "-c", f"setsid sleep {MARK}; true"])
    running = begun(2)
    sandbox.delete()
    done["delete"] = {"running": running, "left": gone(2)}
    return done


def listens(server: subprocess.Popen[str]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{URL}/health", timeout=2):
            return True
        time.sleep(0.02)
    return False


def serve() -> dict[str, Any]:
    with open(os.memfd_create("said"), "w+") as said:
        server = subprocess.Popen([*CAPSULE, "serve"], stdout=said, stderr=said, text=True)
        try:
            found = served(server)
        finally:
            server.kill()
            server.wait()
        said.seek(0)
        return {**found, "said": said.read()[-6000:], "left": gone(2)}


def served(server: subprocess.Popen[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"listens": listens(server)}
    if found["listens"]:
        try:
            with CapsuleClient(URL) as client:
                found["used"] = (crowd if "crowd" in sys.argv else use)(client)
        except CapsuleError as error:
            found["error"] = f"{type(error).__name__}: {error}"
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        found["exit"] = server.wait(20)
    return found


if __name__ == "__main__":
    signal.alarm(90)  # whatever hangs
    report = {"doctor": doctor()}
    if "doctor" not in sys.argv:
        report["serve"] = serve()
    sys.stdout.write(json.dumps(report) + "\n")
