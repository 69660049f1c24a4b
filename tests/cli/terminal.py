"""A pty with a program on its other end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


class Screen:
    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self.process = process
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, within: float = 20.0) -> str:
        """Everything since the last wait, up to and including `text`."""
        deadline = time.monotonic() + within
        while text not in self.seen:
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                pytest.fail(f"never saw {text!r} on the screen:\n{self.seen}")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def _read(self, within: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], within)
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += data.decode("utf-8", "replace")
        return bool(data)

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def cooked(self) -> bool:
        """Whether the terminal echoes and waits for whole lines."""
        flags = termios.tcgetattr(self._master)[3]
        return bool(flags & termios.ECHO) and bool(flags & termios.ICANON)

    def finish(self, within: float = 20.0) -> int:
        """Its exit code; what it still shows is in `seen`."""
        deadline = time.monotonic() + within
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                pytest.fail(f"it does not end:\n{self.seen}")
            self._read(0.05)
        while self._read(0.05):
            pass
        return self.process.wait()


@contextlib.contextmanager
def at_terminal(
    command: Sequence[str], env: dict[str, str], cwd: Path, *, rows: int = 24, cols: int = 80
) -> Iterator[Screen]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
    process = subprocess.Popen(
        [*_CONTROLLING, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**env, "TERM": "xterm-256color"},
        cwd=cwd,
        start_new_session=True,
    )
    try:
        yield Screen(master, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(slave)
        os.close(master)


# Makes the pty the session's own, so that Ctrl-C and a new size become signals.
_CONTROLLING = (
    "/usr/bin/env",
    "python3",
    "-c",
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execvp(sys.argv[1], sys.argv[1:])",
)
