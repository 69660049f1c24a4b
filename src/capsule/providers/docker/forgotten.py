"""Containers that an Engine has started and forgotten.

A dockerd that is killed while it starts a container does not know of it when it is back: it says
that the container was never started, and to remove it ends nothing. Its shim goes on, and so does
what runs behind it, which no docker command shows. On our own host the shim is ended instead;
then containerd clears away all that belongs to it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CLEARED_WITHIN = 5.0


def end_forgotten(container: str) -> None:
    """Of a container that the Engine has removed. Blocks; returns when nothing of it runs."""
    shims = [pid for pid in _pids() if _is_shim(pid, container)]
    for pid in shims:
        _kill(pid, container)
    give_up = time.monotonic() + (CLEARED_WITHIN if shims else 0.0)
    while time.monotonic() < give_up and any(_belongs(pid, container) for pid in _pids()):
        time.sleep(0.02)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _is_shim(pid: int, container: str) -> bool:
    words = _read(pid, "cmdline").split("\0")
    return "shim" in words[0] and container in words


def _belongs(pid: int, container: str) -> bool:
    return _is_shim(pid, container) or container in _read(pid, "cgroup")


def _kill(pid: int, container: str) -> None:
    """A number may have been given to another process since we looked: this one is held first."""
    with suppress(OSError):
        held = os.pidfd_open(pid)
        try:
            if _is_shim(pid, container):
                signal.pidfd_send_signal(held, signal.SIGKILL)
        finally:
            os.close(held)


def _read(pid: int, name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""
