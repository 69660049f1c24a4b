"""Programs that are root inside: what root could do, and what every other program tries as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.escape import test_agent, test_devices, test_mounts, test_namespaces, test_privileges
from tests.escape.attempt import ROOT, WITH_ROOT, Attempt, cases, proofs, scenario
from tests.escape.conftest import Cell
from tests.escape.machine import Refused

pytestmark = pytest.mark.real

Check = Callable[[Attempt], None]

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
OTHERS = (test_agent, test_devices, test_mounts, test_namespaces, test_privileges)

ATTEMPTS = [
    Attempt(
        "chroot",
        "leave the root by chroot, and climb",
        """
        os.makedirs("jail", exist_ok=True)
        os.chroot("jail")
        for _ in range(64): os.chdir("..")
        os.chroot(".")
        escaped(os.listdir("/"))
        """,
        proof=ROOT,
    ),
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
        "kernel-settings",
        "change settings of the kernel in /proc and /sys",
        """
        names = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
                 "/proc/sys/vm/swappiness", "/proc/sys/user/max_user_namespaces",
                 "/proc/sys/net/ipv4/ip_forward", "/proc/sysrq-trigger",
                 "/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs"]
        opened = []
        for name in names:
            try:
                os.open(name, os.O_WRONLY)
                opened.append(name)
            except OSError as error:
                refused = error
        if opened: escaped(opened)
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "parents-namespace",
        "get hold of the user namespace above one's own, and of the one that owns the others",
        """
        found = []
        for kind in ("user", "mnt", "pid", "net", "uts", "ipc"):
            fd = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
            for question in (0xb701, 0xb702):
                try:
                    above = fcntl.ioctl(fd, question)
                    call("setns", above, 0)
                    found.append(kind)
                except OSError as error:
                    refused = error
        if found: escaped(found)
        raise refused
        """,
        proof=OF_A_SANDBOX,
    ),
    Attempt(
        "map-more-ids",
        "map more ids into one's namespace, and allow groups again",
        """
        texts = (("uid_map", "0 0 65536"), ("gid_map", "0 0 65536"), ("setgroups", "allow"))
        for name, text in texts:
            try:
                put(f"/proc/self/{name}", text)
                escaped(name)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=OF_A_SANDBOX,
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
        "higher-limits",
        "raise hard limits: processes, files, locked memory, priorities",
        """
        for which in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK,
                      resource.RLIMIT_FSIZE, resource.RLIMIT_SIGPENDING, resource.RLIMIT_NICE):
            hard = resource.getrlimit(which)[1]
            if hard == resource.RLIM_INFINITY: continue
            try:
                resource.setrlimit(which, (hard + 1, hard + 1))
                escaped(which)
            except (OSError, ValueError) as error:
                refused = error
        raise OSError(str(refused))
        """,
        proof="most limits of the machine's root are none",
    ),
    Attempt(
        "priority",
        "take a real-time priority, or be nicer to oneself",
        """
        done = []
        for name, attempt in (("nice", lambda: os.nice(-10)),
                              ("fifo", lambda: os.sched_setscheduler(0, 1, os.sched_param(10)))):
            try:
                attempt()
                done.append(name)
            except OSError as error:
                refused = error
        if done: escaped(done)
        raise refused
        """,
        proof=HARM,
    ),
    Attempt(
        "keyrings",
        "use the kernel's keyrings, which no namespace holds",
        """
        if tried("keyctl", 0, -3, 1) == 0: escaped("keyctl")
        if tried("add_key", b"user", b"x", b"y", 1, -3) not in (1, 38): escaped("add_key")
        if tried("request_key", b"user", b"x", None, -3) not in (1, 38): escaped("request_key")
        """,
        proof="the keyring of whoever runs the tests is not ours to fill",
    ),
    Attempt(
        "machine-calls",
        "set the clock or the name, reboot, swap, load a module, read the kernel's log",
        """
        calls = (("reboot", 0xfee1dead, 672274793, 0, 0), ("sethostname", b"x", 1),
                 ("swapoff", b"/x"), ("settimeofday", None, None), ("delete_module", b"x", 0),
                 ("syslog", 3, None, 0), ("kexec_load", 0, 0, None, 0), ("acct", b"/x"))
        done = [name for name, *given in calls if tried(name, *given) == 0]
        if done: escaped(done)
        """,
        proof=HARM,
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


def as_root(attempt: Attempt, module: str) -> Attempt:
    """The attempt of another module once more; known to work where it is known to work there."""
    moot = {cell: GRANTED[attempt.name] for cell in WITH_ROOT if attempt.name in GRANTED}
    stands = {} if attempt.name in BETTER else attempt.stands
    kept = {cell: why for cell, why in stands.items() if cell in WITH_ROOT}
    fatal = {cell: why for cell, why in attempt.fatal.items() if cell in WITH_ROOT}
    also = {cell: why for cell, why in attempt.moot.items() if cell in WITH_ROOT}
    return replace(
        attempt,
        name=f"{module}-{attempt.name}",
        proof=f"see `{attempt.name}` of {module}",
        user="root",
        moot={**also, **moot},
        stands=kept,
        fatal=fatal,
    )


AGAIN = [
    as_root(attempt, module.__name__.rpartition("test_")[2])
    for module in OTHERS
    for attempt in module.ATTEMPTS
]


@cases(ATTEMPTS, cells=WITH_ROOT)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@cases(AGAIN, cells=WITH_ROOT)
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
