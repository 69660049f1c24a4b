"""`capsule` in processes of its own, quickly: one program has it loaded and forks them.

Tests start it some hundred times; importing everything anew would be most of the time that
takes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.support import ROOT, clean_env
from tests.support.users import User

_MAIN = (Path(__file__).parent / "nursery_main.py").read_text()


class Nursery:
    def __init__(self, process: subprocess.Popen[str], user: User | None) -> None:
        self.process = process
        self.user = user
        self._asking = threading.Lock()
        self._numbers = itertools.count()

    def serve(self, log: Path, **request: Any) -> int:
        """The pid of a server that begins, and writes to this file."""
        return self.start("serve", streams=[os.devnull, str(log), str(log)], **request)

    def start(self, *argv: str, streams: Sequence[str], **request: Any) -> int:
        """The pid of a `capsule …` that begins. `streams`: what it opens as its standard ones."""
        asked = {"do": "start", "argv": argv, "streams": streams, "umask": umask(), **request}
        return int(self._ask(asked)["pid"])

    def code(self, pid: int) -> int | None:
        """What it exited with; None while it runs."""
        code: int | None = self._ask({"do": "code", "pid": pid})["code"]
        return code

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._asking:
            number = next(self._numbers)
            self.process.stdin.write(json.dumps({"n": number, **request}) + "\n")
            self.process.stdin.flush()
            while True:
                answer: dict[str, Any] = json.loads(self.process.stdout.readline())
                if answer["n"] == number:  # not the answer to a test that its timeout has ended
                    return answer


def umask() -> int:
    """Ours as it is now: a nursery has that of whoever happened to need it first."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("Umask:"))
    return int(line.split()[1], 8)


class ServerProcess(Protocol):
    """What tests do with a server's process: of `Popen`, and of one from a nursery."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Born:
    """A process that a nursery forked."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._nursery.code(self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (3600 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"server {self.pid}", timeout or 0)
            time.sleep(0.005)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class OwnNursery:
    """The one of this test process, begun by whoever needs it first."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    @functools.cached_property
    def nursery(self) -> Nursery:
        return self._stack.enter_context(nursery())

    def close(self) -> None:
        self._stack.close()


OWN = OwnNursery()


@contextmanager
def nursery(user: User | None = None) -> Iterator[Nursery]:
    """Its servers run as `user`, or as whoever runs the tests."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes["start_new_session"] = True  # Ctrl-C is for those who clean up with its help
    # The source is handed over as text: an ordinary user may not be allowed to read this tree.
    if user is None:
        argv = [sys.executable, "-c", _MAIN]
        process = subprocess.Popen(argv, env=clean_env(), cwd=ROOT, **pipes)
    else:
        process = user.popen(user.python, "-c", _MAIN, **pipes)
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield Nursery(process, user)
        finally:
            process.kill()
