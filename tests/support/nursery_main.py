"""The program behind `nursery.py`: imports Capsule once, then forks a `capsule` for each request.

    stdin    {"n", "do": "start", "argv", "env", "cwd", "streams", "umask", …}  →  {"n", "pid"}
             {"n", "do": "code", "pid"}                      →  {"n", "code"}, null while it runs

A server that begins here is one that `capsule serve` would have begun, half a second later. What
is added for those who ask for it is one thread, which tells what cannot be seen from outside
(`watcher`).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "anyio._backends._asyncio",
    "capsule.app",
    "capsule.cli.app",
    "capsule.cli.completion",
    "capsule.cli.cp",
    "capsule.cli.doctor",
    "capsule.cli.main",
    "capsule.cli.remote",
    "capsule.cli.run",
    "capsule.cli.serve",
    "capsule.cli.templates",
    "capsule.providers.docker.build",
    "capsule.providers.local.build",
    "encodings.idna",
    "jsonschema",
    "pydantic.v1",
    "typer.main",
    "uvicorn.lifespan.off",
)
CLOUDS = "capsule.providers.e2b.build"  # with an SDK that takes as long again

WRITE = os.O_WRONLY | os.O_CREAT | os.O_APPEND
FLAGS = (os.O_RDONLY, WRITE, WRITE)  # of the standard streams

PR_SET_PDEATHSIG = 1

codes: dict[int, int] = {}


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            answer: dict[str, Any] = {"pid": begin(request)}
        else:
            answer = {"code": codes.get(request["pid"])}
        print(json.dumps({"n": request["n"], **answer}), flush=True)


def begin(request: dict[str, Any]) -> int:
    if request["env"].get("CAPSULE_PROVIDER") == "e2b":
        importlib.import_module(CLOUDS)
    # Opened here: whoever asks may close its own end when it has our answer.
    fds = [
        os.open(path, flags, 0o644) for path, flags in zip(request["streams"], FLAGS, strict=True)
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = os.fork()
    if not pid:
        become(request, fds)
    codes.pop(pid, None)  # of an earlier process with this number
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for fd in fds:
        os.close(fd)
    return pid


def reap(*_: object) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        codes[pid] = os.waitstatus_to_exitcode(status)


def become(request: dict[str, Any], fds: list[int]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        # Tests that are killed leave no server behind.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(request["cwd"])
        os.umask(request["umask"])
        rewire(fds)
        os.environ.clear()
        os.environ.update(request["env"])
        if nofile := request.get("nofile"):
            resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))
        for file in request.get("join", ()):
            Path(file).write_text(str(os.getpid()))
        for place, value in request.get("replace", {}).items():
            module, _, name = place.partition(":")
            assert hasattr(importlib.import_module(module), name), place
            setattr(importlib.import_module(module), name, value)
        set_clock(request.get("ahead", 0.0))
        if watch := request.get("watch"):
            watcher(watch)
        code = run(request["argv"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rewire(fds: list[int]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(3, 256)
    # As an interpreter begins with them: of ours, one has read a request.
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def run(argv: list[str]) -> int:
    from capsule.cli.main import main

    sys.argv = ["capsule", *argv]
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def watcher(path: str) -> None:
    """Answer on a Unix socket: `tasks` of the server's loop, or `clock SECONDS`: from now on the
    wall clock shows so much more.
    """
    import uvloop

    loops: list[asyncio.AbstractEventLoop] = []
    make = uvloop.new_event_loop

    def remember() -> uvloop.Loop:
        loop = make()
        loops.append(loop)
        return loop

    uvloop.new_event_loop = remember
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)

    def watch() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                word, *more = stream.readline().split()
                stream.write(json.dumps(answer_to(word, more, loops[0])) + "\n")
                stream.flush()

    threading.Thread(target=watch, daemon=True).start()


def answer_to(word: str, more: list[str], loop: asyncio.AbstractEventLoop) -> object:
    match word:
        case "tasks":
            return tasks(loop)
        case "clock":
            set_clock(float(more[0]))
            return None
    raise ValueError(word)


def set_clock(ahead: float) -> None:
    from capsule.service.clock import SystemClock

    def now(self: SystemClock) -> float:
        return time.time() + ahead

    SystemClock.now = now  # type: ignore[method-assign]


def tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    gc.collect()  # what was forgotten complains when it is collected
    return sorted(repr(task.get_coro()) for task in asyncio.all_tasks(loop))


if __name__ == "__main__":
    main()
