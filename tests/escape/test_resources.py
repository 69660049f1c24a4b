"""Resources: take more than the sandbox was given, or leave something that cannot be removed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.escape.attempt import (
    ALONE,
    LOCAL,
    PEER,
    Attempt,
    Check,
    GotOut,
    cases,
    proofs,
    scenario,
)
from tests.escape.conftest import Cell
from tests.escape.machine import Refused, Sandbox
from tests.support import wait_for

pytestmark = pytest.mark.real


NO_COUNT = (
    "without cgroups and namespaces a user's processes are only counted together (unenforced): a "
    "bomb ends, but above the sandbox's own limit"
)
NO_SUM = "without cgroups memory is looked at, and what no process has mapped is not seen"
ONE_COUNT = (
    "the cgroup counts the agent's processes with the program's: where those take all there are, "
    "a file operation is refused until they are killed"
)
NO_QUOTA = "a plain directory has no quota (unenforced)"
USER_MEMORY = {"namespaces-user": NO_SUM, "landlock-user": NO_SUM}
SENTRY = {
    "gvisor": "memory is counted for gVisor's kernel with all that runs on it: it ends as one"
}
PLAIN_DISK = {"landlock-root": NO_QUOTA, "landlock-user": NO_QUOTA}

# The sandboxes of this module have 256 MiB of memory, and 64 MiB of disk. Without a cgroup it takes
# a moment until somebody sees that it is too much.
MUCH = {"mib": 400, "noticed": 1.5}

ATTEMPTS = [
    Attempt(
        "fork-bomb",
        "make more processes than the sandbox may have",
        """
        children = []
        try:
            while len(children) < 150:
                pid = os.fork()
                if pid == 0:
                    signal.pause()
                children.append(pid)
        finally:
            for pid in children: os.kill(pid, 9)
        escaped(f"{len(children)} processes")
        """,
        proof=PEER,
        killed=True,
        fatal=SENTRY,
        stands={"landlock-user": NO_COUNT},
        unenforced="processes",
    ),
    Attempt(
        "thread-bomb",
        "make more threads",
        """
        import threading
        stop, threads = threading.Event(), []
        try:
            while len(threads) < 150:
                threads.append(threading.Thread(target=stop.wait, daemon=True))
                threads[-1].start()
        except RuntimeError as error:
            raise OSError(11, str(error))
        escaped(f"{len(threads)} threads")
        """,
    ),
    Attempt(
        "memory",
        "use more memory than the sandbox has",
        """
        try:
            space = bytearray(A["mib"] << 20)
        except MemoryError:
            raise OSError(12, "no memory")
        escaped(f"{len(space) >> 20} MiB")
        """,
        args=MUCH,
        killed=True,
        fatal=SENTRY,
    ),
    Attempt(
        "memory-of-many",
        "use it in several processes, each with its share",
        """
        pipes, children = [], []
        for _ in range(4):
            one, other = os.pipe()
            pid = os.fork()
            if pid == 0:
                space = bytearray(A["mib"] << 18)
                os.write(other, b"x")
                signal.pause()
            os.close(other)
            pipes.append(one)
            children.append(pid)
        got = sum(os.read(pipe, 1) == b"x" for pipe in pipes)
        time.sleep(A["noticed"])
        got -= sum(os.waitpid(pid, os.WNOHANG)[0] > 0 for pid in children)
        for pid in children: os.kill(pid, 9)
        if got == 4: escaped(f"{A['mib']} MiB together")
        """,
        args=MUCH,
        killed=True,
        fatal=SENTRY,
    ),
    Attempt(
        "memory-files",
        "use it as files in memory (memfd), which no limit of a process counts",
        """
        block = bytes(1 << 20)
        files = []
        for n in range(A["mib"]):
            if n % 50 == 0: files.append(os.memfd_create("x"))
            os.write(files[-1], block)
        escaped(f"{A['mib']} MiB")
        """,
        args=MUCH,
        killed=True,
        fatal=SENTRY,
        stands=USER_MEMORY,
        unenforced="memory",
    ),
    Attempt(
        "shared-memory",
        "use it as shared anonymous memory",
        """
        space = mmap.mmap(-1, A["mib"] << 20)
        for at in range(0, A["mib"] << 20, 4096): space[at] = 1
        time.sleep(A["noticed"])
        escaped(f"{A['mib']} MiB")
        """,
        args=MUCH,
        killed=True,
        fatal=SENTRY,
    ),
    Attempt(
        "sysv-memory",
        "use it as System V memory, which outlives its process",
        """
        libc.shmat.restype = ctypes.c_void_p
        segment = check(libc.shmget(0, A["mib"] << 20, 0o1600))
        at = libc.shmat(segment, None, 0)
        libc.shmctl(segment, 0, None)
        ctypes.memset(at, 1, A["mib"] << 20)
        time.sleep(A["noticed"])
        escaped(f"{A['mib']} MiB")
        """,
        args=MUCH,
        killed=True,
        fatal=SENTRY,
    ),
    Attempt(
        "fill-dev-shm",
        "use it as files in /dev/shm",
        """
        block, written = bytes(1 << 20), 0
        with open("/dev/shm/capsule-fill", "wb", buffering=0) as file:
            os.unlink("/dev/shm/capsule-fill")
            for _ in range(A["mib"]): file.write(block)
        escaped(f"{A['mib']} MiB")
        """,
        args=MUCH,
        killed=True,
    ),
    Attempt(
        "fill-disk",
        "write more than the disk's size, in several files and places",
        """
        block, written = bytes(1 << 20), 0
        for place in (".", os.environ["TMPDIR"]):
            for n in range(3):
                fd = os.open(f"{place}/fill-{place == '.'}-{n}", os.O_CREAT | os.O_WRONLY)
                for _ in range(16):
                    os.write(fd, block)
                    written += 1
        escaped(f"{written} MiB")
        """,
        stands=PLAIN_DISK,
        unenforced="disk",
    ),
    Attempt(
        "fill-inodes",
        "make more files than the disk may have",
        """
        os.mkdir("many")
        for n in range(2400): os.close(os.open(f"many/{n}", os.O_CREAT | os.O_WRONLY))
        escaped("2400 files")
        """,
        stands=PLAIN_DISK,
        unenforced="inodes",
    ),
    Attempt(
        "sparse-file",
        "make a file of a terabyte that takes no room, for whoever copies it",
        """
        fd = os.open("sparse", os.O_CREAT | os.O_RDWR)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        os.ftruncate(fd, 1 << 40)
        escaped(os.fstat(fd).st_size)
        """,
    ),
    Attempt(
        "descriptors",
        "open more files than a process may",
        """
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(400)]
        escaped(f"{len(held)} descriptors")
        """,
    ),
    Attempt(
        "raise-limits",
        "raise a limit of one's own above what was given",
        """
        raised = []
        for name in ("NOFILE", "NPROC", "FSIZE", "MEMLOCK"):
            limit = getattr(resource, "RLIMIT_" + name)
            soft, hard = resource.getrlimit(limit)
            if hard == resource.RLIM_INFINITY: continue
            try:
                resource.setrlimit(limit, (soft, hard + 1))
                raised.append(limit)
            except (OSError, ValueError):
                pass
        if raised: escaped(raised)
        """,
        proof="root without CAP_SYS_RESOURCE cannot, and there is no harmless proof with it",
    ),
    Attempt(
        "cpu",
        "use more cores at once than the sandbox has",
        """
        if len(os.sched_getaffinity(0)) < 2 and not A.get("keeper"): absent("it has one CPU")
        start = time.monotonic()
        for _ in range(4):
            if os.fork() == 0:
                while time.monotonic() < start + 0.5: pass
                os._exit(0)
        for _ in range(4): os.wait()
        used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        spent = time.monotonic() - start
        more = used > 1.3 * spent and not A.get("gvisor")
        if more: escaped(f"{used:.2f} s of CPU in {spent:.2f} s")
        if not A.get("keeper"): absent("the machine is busy")
        """,
        actors=("cpu_meter",),
    ),
]

# A container has a memory cgroup of its own.
OF_NEIGHBOURS = [
    Attempt(
        "oom-score",
        "become the last whom the kernel ends when memory is short: lower one's own oom_score_adj",
        """
        before = open("/proc/self/oom_score_adj").read()
        put("/proc/self/oom_score_adj", str(int(before) + 1))
        put("/proc/self/oom_score_adj", before)
        escaped("raised and lowered again")
        """,
    ),
    Attempt(
        "oom-score-of-another",
        "lower that of another process",
        """
        child = os.fork()
        if child == 0:
            signal.pause()
        path = f"/proc/{child}/oom_score_adj"
        try:
            before = open(path).read()
            put(path, str(int(before) + 1))
            put(path, before)
        finally:
            os.kill(child, 9)
        escaped("raised and lowered again")
        """,
    ),
]
BY_ROOT = [replace(each, name=f"{each.name}-by-root", user="root") for each in OF_NEIGHBOURS]


@cases(ATTEMPTS)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@cases(OF_NEIGHBOURS, LOCAL)
def test_leaves_neighbours_alone(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@cases(BY_ROOT, ("namespaces-root", "namespaces-user"))
def test_root_leaves_neighbours_alone(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@proofs([*ATTEMPTS, *OF_NEIGHBOURS])
def test_works_outside(attempt: Attempt, works: Check) -> None:
    works(attempt)


BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""


@scenario(
    "starve-files",
    "keep the file API from working by a fork bomb",
    proof=ALONE,
    stands={"docker": ONE_COUNT},
)
def test_files_can_be_used_beside_a_fork_bomb(cell: Cell) -> None:
    with cell.box(processes=20) as sandbox:
        running = _bomb(sandbox)
        start = time.monotonic()
        try:
            sandbox.write("/workspace/file", "text")
            assert sandbox.read("/workspace/file") == "text"
            sandbox.write("/workspace/file", "more")
        except Refused as refusal:
            raise GotOut(str(refusal)) from None
        assert time.monotonic() - start < 8
        sandbox.ask("kill", "bomb")
        cell.driver.wait(running)


def _bomb(sandbox: Sandbox) -> int:
    running = sandbox.send("python3", "-c", BOMB, id="bomb", timeout=10.0)
    wait_for(lambda: _processes(sandbox) > 12, what="the bomb went off")
    return running


def _processes(sandbox: Sandbox) -> int:
    return int(sandbox.ask("call", "usage")["result"]["processes"])


@scenario(
    "output-flood",
    "fill the server's memory or disk with output, on both streams at once",
    proof="it is the runner that keeps output, not the host",
)
def test_output_is_cut(cell: Cell) -> None:
    flood = "yes $(head -c 10000 /dev/zero | tr '\\0' x) & yes 2>&1 >&2"
    with cell.box() as sandbox:
        running = sandbox.send("/bin/sh", "-c", flood, timeout=0.6, output_limit=100_000)
        start = time.monotonic()
        sandbox.ask("call", "ping")
        assert time.monotonic() - start < 2
        before = _keeper_memory(sandbox)
        ended = cell.driver.wait(running)
        assert ended["reason"] == "timed_out"
        assert len(ended["out"]) <= 100_000 and len(ended["err"]) <= 100_000
        assert ended["stdout_bytes"] + ended["stderr_bytes"] > 200_000, "it was a flood"
        assert _keeper_memory(sandbox) - before < 8 << 20


def _keeper_memory(sandbox: Sandbox) -> int:
    words = Path(f"/proc/{sandbox.handle['keeper']}/statm").read_text().split()
    return int(words[1]) * os.sysconf("SC_PAGESIZE")


DEEP = """
import os
for _ in range(1200):
    os.mkdir("d" * 50)
    os.chdir("d" * 50)
"""


CLOSED = """
import os
for name in ("a", "a/b", "a/b/c"):
    os.mkdir(name)
    open(name + "/file", "w").close()
for name, mode in (("a/b/c", 0), ("a/b", 0o500), ("a", 0o400)):
    fd = os.open(name, os.O_RDONLY)
    os.fchmod(fd, mode)
    os.close(fd)
"""


@scenario(
    "closed-folders",
    "leave folders behind that not even their owner may enter or empty",
    proof="see deep-folders",
)
def test_nothing_of_a_hostile_tree_is_left(cell: Cell) -> None:
    with cell.box() as sandbox:
        assert sandbox.exec("python3", "-c", CLOSED + DEEP)["exit_code"] == 0
        sandbox.destroy()
        left = [sandbox.handle.get("disk_dir"), *sandbox.handle["cgroups"]]
        assert not [path for path in left if path and os.path.lexists(path)]
