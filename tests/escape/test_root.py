"""Programs that are root inside: what only root could do, and what other programs try as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.escape import test_agent
from tests.escape.attempt import ROOT, WITH_ROOT, Attempt, Check, again, cases, proofs, scenario
from tests.escape.attempts import devices, kernel, mounts, namespaces, privileges
from tests.escape.conftest import Cell
from tests.escape.machine import Refused

pytestmark = pytest.mark.real


AS_ROOT: dict[str, Any] = {"user": "root", "cwd": "/workspace"}
HARM = "it would harm the machine"
OF_A_SANDBOX = "only a sandbox has such a root"

# What root inside has, and is no way out: testing/users.py says what exactly.
GRANTED = {
    "become-root": "it is root already",
    "capabilities": "it has four, over the files of the sandbox",
    "bounding-set": "as capabilities",
    "ambient": "one that it has already",
    "setuid-of-another": "its own files are root's, and no mount heeds the bit",
    "switch-user-programs": "it is root already",
}
# What stands for the user, and not for root, who is in a namespace of its own.
BETTER = ("same-namespaces",)
OTHERS = (test_agent, devices, kernel, mounts, namespaces, privileges)

ATTEMPTS = [
    Attempt(
        "raw-socket",
        "send packets of one's own making",
        """
        for family, kind, protocol in ((2, 3, 1), (2, 3, 255), (10, 3, 58), (17, 3, 3), (17, 2, 3)):
            try:
                socket.socket(family, kind, protocol)
                escaped((family, kind))
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "more-capabilities",
        "take the capabilities that were left out",
        """
        full = struct.pack("6I", 0xffffffff, 0xffffffff, 0, 0xffffffff, 0xffffffff, 0)
        if tried("capset", struct.pack("Ii", 0x20080522, 0), full) == 0: escaped("capset")
        raised = [cap for cap in range(41) if libc.prctl(47, 2, cap, 0, 0) == 0]
        if raised: escaped(raised)
        script = "grep CapEff /proc/self/status; su -c 'grep CapEff /proc/self/status' 2>&1"
        said = subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout
        held = [int(line.split()[-1], 16) for line in said.splitlines() if "CapEff" in line]
        if any(caps & ~0x1b for caps in held): escaped(held)
        """,
        proof=OF_A_SANDBOX,
    ),
    Attempt(
        "files-by-handle",
        "open files by a handle, past every folder",
        """
        handle = ctypes.create_string_buffer(struct.pack("Ii", 8, 1) + b"\\x02" + b"\\0" * 15)
        fd = os.open("/", os.O_RDONLY)
        call("open_by_handle_at", fd, handle, os.O_RDONLY)
        escaped("opened")
        """,
        proof="which handles there are is up to the file system",
    ),
    Attempt(
        "give-files-away",
        "give a file to another id, or a setuid bit to the host's programs",
        """
        open("own", "w").close()
        for uid in (1, 1000, 65534):
            try:
                os.chown("own", uid, uid)
                if os.stat("own").st_uid not in (0, 65534): escaped(uid)
            except OSError as error:
                refused = error
        for name in ("/usr/bin/env", "/etc/passwd", "/usr", "/"):
            try:
                os.chmod(name, 0o4777)
                escaped(name)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=HARM,
    ),
]
ATTEMPTS = [replace(attempt, user="root") for attempt in ATTEMPTS]


AGAIN = [
    replace(attempt, user="root", stands={} if attempt.name in BETTER else attempt.stands)
    for module in OTHERS
    for attempt in module.ATTEMPTS
    if attempt.name not in GRANTED
]


@cases(ATTEMPTS, cells=WITH_ROOT)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@again(AGAIN, cells=WITH_ROOT)
def test_what_others_try_fails_for_root(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@proofs(ATTEMPTS)
def test_works_outside(attempt: Attempt, works: Check) -> None:
    works(attempt)


@scenario(
    "enter-roots-namespace",
    "become root by entering the namespace of a program that is",
    proof=OF_A_SANDBOX,
    cells=WITH_ROOT,
)
def test_nobody_becomes_root_by_a_roots_namespace(cell: Cell) -> None:
    look = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for pid in [int(sys.argv[1]), *map(int, filter(str.isdigit, os.listdir("/proc")))]:
    try:
        fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    except OSError:
        continue
    libc.setns(fd, 0x10000000)
    os.close(fd)
print(os.getuid())
"""
    with cell.box() as sandbox:
        begun = sandbox.ask("start", ["sleep", "600"], "root", timeout=0.0, **AS_ROOT)
        ended = sandbox.exec("python3", "-c", look, str(begun["pid"]))
        assert ended["out"].strip() not in ("", "0"), ended
        sandbox.ask("kill", "root")


@scenario(
    "stop-roots-helper",
    "hang the agent by stopping whoever makes root's namespace",
    proof=OF_A_SANDBOX,
    cells=WITH_ROOT,
)
def test_whoever_makes_the_namespace_hangs_nobody(cell: Cell) -> None:
    stopper = """
import os, time
end = time.monotonic() + 2.5
while time.monotonic() < end:
    try: os.kill(-1, 19)
    except OSError: pass
"""
    with cell.box(fresh=True) as sandbox:
        sandbox.ask("start", ["python3", "-c", stopper], "stopper", timeout=4.0)
        try:
            ended = sandbox.exec("true", timeout=1.0, **AS_ROOT)
            assert ended["reason"] in ("timed_out", "exited"), ended
        except Refused as refusal:
            assert "no root here" in str(refusal), refusal
        sandbox.ask("kill", "stopper")  # which pid 1 does, if it does not hang
        assert sandbox.answers()
        assert sandbox.exec("id", "-u", **AS_ROOT)["out"] == "0\n"


@scenario(
    "roots-processes",
    "start more processes as root than a sandbox may have, beside those of its user",
    proof="how many there may be outside is the machine's business",
    cells=WITH_ROOT,
)
def test_root_is_counted_too(cell: Cell) -> None:
    bomb = """
import os, time
made = 0
try:
    while made < 300:
        if not os.fork(): time.sleep(60)
        made += 1
except OSError: pass
print(made)
"""
    with cell.box(fresh=True, processes=40) as sandbox:
        made = int(sandbox.ask("exec", ["python3", "-c", bomb], "bomb", **AS_ROOT)["out"])
        assert 0 < made <= 44, f"{made} processes of root's"
        sandbox.ask("kill", "bomb")
        assert sandbox.exec("/bin/sh", "-c", "echo still here")["out"] == "still here\n"
        assert sandbox.answers()
