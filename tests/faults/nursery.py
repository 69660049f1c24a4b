"""Servers in processes of their own, quickly: one program has Capsule loaded and forks them.

A fault suite starts a server a hundred times; importing everything anew would be most of the time
it takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.servers import clean_env
from tests.support.users import User

_MAIN = (Path(__file__).parent / "nursery_main.py").read_text()


class Nursery:
    def __init__(self, process: subprocess.Popen[str], user: User | None) -> None:
        self.process = process
        self.user = user

    def start(self, **request: Any) -> int:
        """The pid of a server that begins."""
        return int(self._ask({"do": "start", **request})["pid"])

    def code(self, pid: int) -> int | None:
        """What it exited with; None while it runs."""
        code: int | None = self._ask({"do": "code", "pid": pid})["code"]
        return code

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@contextmanager
def nursery(user: User | None = None) -> Iterator[Nursery]:
    """Its servers run as `user`, or as whoever runs the tests."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
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
