"""Servers to measure: Capsule itself, and an echo that does nothing but answer."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ECHO = """
import sys, uvicorn
BLOCK = bytes(256 * 1024)
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    count = int(scope["path"].strip("/") or 0)
    head = [(b"content-length", b"%d" % (count * len(BLOCK) or 2))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for _ in range(count):
        await send({"type": "http.response.body", "body": BLOCK, "more_body": True})
    await send({"type": "http.response.body", "body": b"" if count else b"ok"})
uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", lifespan="off",
            log_level="error", access_log=False)
"""  # takes what it is sent; GET /8 answers with 8 blocks of 256 KiB, and / with "ok"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    pid: int
    base: Path  # of its data
    run: Path


@contextmanager
def capsule_server(max_sandboxes: int, **settings: str) -> Iterator[str]:
    with serving(max_sandboxes, **settings) as server:
        yield server.url


@contextmanager
def serving(max_sandboxes: int, **settings: str) -> Iterator[Serving]:
    """A server of our own on a free port, with its own directories; nothing of it is left."""
    # Short, because Unix sockets are bound below it.
    base = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    base.chmod(0o755)  # programs of a sandbox have another uid, and must get through
    run = in_memory()
    port = free_port()
    env = {
        **os.environ,
        "CAPSULE_PORT": str(port),
        "CAPSULE_DATA_DIR": str(base / "data"),
        "CAPSULE_RUN_DIR": str(run),
        "CAPSULE_MAX_SANDBOXES": str(max_sandboxes),
        "CAPSULE_DRAIN": "delete",
        "CAPSULE_LOG_LEVEL": "warning",
        **settings,
    }
    command = [sys.executable, "-c", "from capsule.cli.main import main; main()", "serve"]
    url = f"http://127.0.0.1:{port}"
    try:
        with _running(command, env, url, "/health") as pid:
            yield Serving(url, pid, base, run)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)


def in_memory() -> Path:
    """For a run directory. /run is a tmpfs where systemd is, and not in every container."""
    path = Path(tempfile.mkdtemp(prefix="cb-", dir="/dev/shm"))
    path.chmod(0o755)
    return path


@contextmanager
def echo_server() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-c", ECHO, str(port)]
    with _running(command, dict(os.environ), f"http://127.0.0.1:{port}", "/"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _running(command: list[str], env: dict[str, str], url: str, path: str) -> Iterator[int]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        _wait_until_it_answers(process, url + path)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"bench: the server ended with status {process.returncode}")
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.02)
    raise SystemExit(f"bench: no answer from {url} within 20 s")
