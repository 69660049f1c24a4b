"""A real server in a process of its own, for tests that talk to it from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import free_port

CAPSULE = (sys.executable, "-c", "from capsule.cli.main import main; main()")


@dataclass(frozen=True, slots=True)
class RealServer:
    url: str
    port: int
    process: subprocess.Popen[str]
    base: Path  # its data and run directories are below
    env: dict[str, str]


def clean_env(**more: str) -> dict[str, str]:
    """Our environment without settings of Capsule that somebody may have exported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CAPSULE_")}
    return {**kept, **more}


@contextmanager
def real_server(**settings: str) -> Iterator[RealServer]:
    """Serves on a free port of loopback with directories of its own; sandboxes end with it.

    `settings` are environment variables without their prefix: real_server(MAX_SANDBOXES="3").
    """
    # Short and not pytest's: Unix sockets are bound below it.
    base = Path(tempfile.mkdtemp(prefix="ct-", dir="/tmp"))
    base.chmod(0o755)  # at the landlock level programs reach their folder below it
    port = free_port()
    named = {
        "PORT": str(port),
        "DATA_DIR": str(base / "data"),
        "RUN_DIR": str(base / "run"),
        "DRAIN": "delete",
        "LOG_LEVEL": "warning",
        **settings,
    }
    env = clean_env(**{f"CAPSULE_{name}": value for name, value in named.items()})
    with open(base / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*CAPSULE, "serve"], env=env, stdout=log, stderr=log, text=True, cwd=base
        )
        server = RealServer(f"http://127.0.0.1:{port}", port, process, base, env)
        try:
            _wait_until_it_answers(server)
            yield server
        finally:
            _stop(process)
            shutil.rmtree(base, ignore_errors=True)


def _wait_until_it_answers(server: RealServer, within: float = 40.0) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    pytest.fail(f"the server does not answer:\n{(server.base / 'log').read_text()}")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
