"""What `sudo` gives: root in the sandbox, as `user: "root"` does, and not a bit more or longer."""

from __future__ import annotations

import pytest

from tests.escape.attempt import WITH_ROOT, scenario
from tests.escape.conftest import Cell
from tests.escape.machine import Sandbox
from tests.escape.test_root import AS_ROOT, OF_A_SANDBOX
from tests.support import wait_for

pytestmark = pytest.mark.real

PATH = "PATH=/opt/capsule/bin:$PATH; "
RIGHTS = """
import os, resource
shown = [line for line in open("/proc/self/status") if line.startswith(
    ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp:"))]
limits = [resource.getrlimit(each) for each in range(16)]
spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net", "pid", "ipc", "cgroup")]
print(shown, limits, spaces, open("/proc/self/uid_map").read().split()[1:], os.umask(0))
"""


@scenario(
    "sudos-rights",
    "be more by sudo than `user: root` makes of a program: ids, capabilities, filters, limits",
    proof=OF_A_SANDBOX,
    cells=WITH_ROOT,
)
def test_sudo_gives_what_root_has(cell: Cell) -> None:
    with cell.box() as sandbox:
        given = sandbox.exec("python3", "-c", RIGHTS, **AS_ROOT)["out"]
        asked = sudo(sandbox, "python3", "-c", RIGHTS)
        assert "NoNewPrivs:\\t1" in given and asked == given


def sudo(sandbox: Sandbox, *words: str) -> str:
    ended = sandbox.exec("/bin/sh", "-c", f'{PATH}exec sudo "$@"', "sh", *words)
    return str(ended["out"])


@scenario(
    "sudos-descriptors",
    "find in a program of sudo's a descriptor that its caller did not give it",
    proof=OF_A_SANDBOX,
    cells=WITH_ROOT,
)
def test_nothing_is_left_open(cell: Cell) -> None:
    with cell.box() as sandbox:
        # The list itself is one more, while it is read.
        assert sudo(sandbox, "sh", "-c", "ls /proc/self/fd").split() == ["0", "1", "2", "3"]


@scenario(
    "outlive-by-sudo",
    "outlive the kill of one's exec as a daemon that sudo has started",
    proof=OF_A_SANDBOX,
    cells=WITH_ROOT,
)
def test_a_kill_reaches_what_sudo_started(cell: Cell) -> None:
    script = (
        "sudo setsid sh -c 'trap \"\" HUP TERM; (echo up > /tmp/up; exec sleep 987654) &'; sleep 60"
    )
    with cell.box() as sandbox:
        sandbox.ask("start", ["/bin/sh", "-c", PATH + script], "daemon", timeout=0.0)
        wait_for(lambda: sandbox.running("sleep987654") or up(sandbox), what="the daemon")
        sandbox.ask("kill", "daemon")
        assert not alive(sandbox)


def up(sandbox: Sandbox) -> bool:
    return bool(sandbox.exec("/bin/sh", "-c", "cat /tmp/up 2>/dev/null; true")["out"])


def alive(sandbox: Sandbox) -> str:
    look = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 98765[4]'; true"
    return str(sandbox.exec("/bin/sh", "-c", look, **AS_ROOT)["out"])


@scenario(
    "crowd-at-the-door",
    "hang or fill pid 1 by many who ask for sudo and say nothing",
    proof=OF_A_SANDBOX,
    cells=WITH_ROOT,
)
def test_who_says_nothing_hangs_nobody(cell: Cell) -> None:
    crowd = """
import socket, sys, time
held = []
for path in ("\\0capsule-sudo", "/dev/capsule-sudo") * 400:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.setblocking(False)
    try: caller.connect(path)
    except OSError: continue
    held.append(caller)
print(len(held), flush=True)
time.sleep(60)
"""
    with cell.box(fresh=True, processes=256) as sandbox:
        sandbox.ask("start", ["python3", "-c", crowd], "crowd", timeout=0.0)
        for _ in range(5):
            assert sandbox.exec("echo", "served")["out"] == "served\n"
        assert sandbox.answers()
        sandbox.ask("kill", "crowd")
        assert sudo(sandbox, "id", "-u") == "0\n"
