"""A real server in a process of its own, for tests that talk to it from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import clean_env, free_port, listens
from tests.support.folders import server_folder, share_roots
from tests.support.nursery import OWN, Born, ServerProcess

CAPSULE = (sys.executable, "-c", "from capsule.cli.main import main; main()")


@dataclass(frozen=True, slots=True)
class RealServer:
    url: str
    port: int
    process: ServerProcess
    base: Path  # its data and run directories are below
    env: dict[str, str]


Begin = Callable[[dict[str, str], Path], ServerProcess]


def forked(env: dict[str, str], base: Path) -> ServerProcess:
    nursery = OWN.nursery
    return Born(nursery, nursery.serve(base / "log", env=env, cwd=str(base)))


def started(env: dict[str, str], base: Path) -> ServerProcess:
    with open(base / "log", "w", encoding="utf-8") as log:
        return subprocess.Popen([*CAPSULE, "serve"], env=env, stdout=log, stderr=log, cwd=base)


@contextmanager
def real_server(begin: Begin = forked, /, **settings: str) -> Iterator[RealServer]:
    """Serves on a free port of loopback with directories of its own; sandboxes end with it.

    `settings` are environment variables without their prefix: real_server(MAX_SANDBOXES="3").
    `started` instead of `forked` is for those who look at the process itself.
    """
    # Open: at the landlock level programs reach their folder below it.
    with server_folder("ct-", mode=0o755, data=None) as base:
        port = free_port()
        named = {
            "PORT": str(port),
            "DATA_DIR": str(base / "data"),
            "RUN_DIR": str(base / "run"),
            "DRAIN": "delete",
            "LOG_LEVEL": "warning",
            **settings,
        }
        share_roots(Path(named["DATA_DIR"]))
        env = clean_env(**{f"CAPSULE_{name}": value for name, value in named.items()})
        process = begin(env, base)
        server = RealServer(f"http://127.0.0.1:{port}", port, process, base, env)
        try:
            _wait_until_it_answers(server)
            yield server
        finally:
            _stop(process)


def _wait_until_it_answers(server: RealServer, within: float = 40.0) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not listens(server.port):
            if server.process.poll() is not None:
                break
            time.sleep(0.01)
            continue
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.01)
    pytest.fail(f"the server does not answer:\n{(server.base / 'log').read_text()}")


def _stop(process: ServerProcess) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
