"""Other sandboxes: what two programs share on one machine, and what one can take from the other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.escape.actors import neighbour
from tests.escape.attempt import ALONE, Attempt, Check, cases, proofs, scenario
from tests.escape.conftest import Cell
from tests.escape.machine import Sandbox, run_unconfined, system_python
from tests.support import wait_for
from tests.support.users import User

pytestmark = pytest.mark.real


ONE_UID = "without root every sandbox runs as the server's own user"
COUNTED = "all sandboxes of a user share the kernel's counter of queued signals for that user"
NO_USERNS = "unless the Engine maps users, all containers' programs are uid 1000 of the host"
COUNTED_1000 = f"{NO_USERNS}, and share what the kernel counts for it"
SENTRY = "gVisor's kernels run as the same user of the host; their programs have none"
VISIBLE = "without a mount namespace names and attributes of one's own user's files can be seen"

ATTEMPTS = [
    Attempt(
        "read-workspace",
        "read a file in another sandbox's workspace, /tmp and /dev/shm, by every path to them",
        """
        name = f"capsule-{A['key']}"
        for path in (f"{A['folder']}/{name}", f"{A['tmp']}/{name}", f"/dev/shm/{name}",
                     f"/tmp/{name}", f"/var/tmp/{name}", f"/proc/{A['pid']}/cwd/{name}",
                     f"/proc/{A['pid']}/root/workspace/{name}", f"/proc/{A['keeper']}/root/{name}"):
            try:
                escaped(open(path).read())
            except OSError as error:
                refused = error
        raise refused
        """,
        actors=("neighbour",),
    ),
    Attempt(
        "plant-file",
        "put a file into another sandbox's workspace",
        """
        with open(f"{A['folder']}/planted", "x"): pass
        if os.path.samefile(A["folder"], "."): raise OSError(1, "that is our own")
        escaped("planted")
        """,
        actors=("neighbour",),
    ),
    Attempt(
        "see-names",
        "learn that a file exists in another sandbox's workspace",
        """
        os.stat(f"{A['folder']}/capsule-{A['key']}")
        escaped("it is there")
        """,
        actors=("neighbour",),
        stands={"landlock-user": VISIBLE},
    ),
    Attempt(
        "sysv-memory",
        "attach another sandbox's System V shared memory",
        """
        libc.shmat.restype = ctypes.c_void_p
        segment = check(libc.shmget(A["key"], 0, 0))
        escaped(ctypes.string_at(libc.shmat(segment, None, 0), 30))
        """,
        actors=("neighbour",),
    ),
    Attempt(
        "sysv-queue",
        "receive from another sandbox's System V message queue",
        """
        queue = check(libc.msgget(A["key"], 0))
        message = ctypes.create_string_buffer(200)
        check(libc.msgrcv(queue, message, 100, 0, 0o4000))
        escaped(message.raw[8:60])
        """,
        actors=("neighbour",),
    ),
    Attempt(
        "abstract-socket",
        "connect to another sandbox's abstract socket",
        """
        s = socket.socket(socket.AF_UNIX)
        s.connect(f"\\0capsule-{A['key']}")
        escaped(s.recv(100))
        """,
        actors=("neighbour",),
    ),
    Attempt(
        "kill",
        "kill a program of another sandbox",
        "os.kill(A['pid'], signal.SIGTERM); time.sleep(0.1); escaped('sent')",
        actors=("neighbour",),
    ),
    Attempt(
        "environment",
        "read the environment and memory of a program of another sandbox",
        """
        for path in (f"/proc/{A['pid']}/environ", f"/proc/{A['pid']}/cmdline"):
            try:
                text = open(path).read()
                if text: escaped(text)
            except OSError as error:
                refused = error
        raise refused
        """,
        actors=("neighbour",),
    ),
    Attempt(
        "host-shared-memory",
        "attach System V memory of the host, and read its /dev/shm",
        """
        try:
            escaped(open(A["shm"]).read())
        except OSError:
            libc.shmat.restype = ctypes.c_void_p
            segment = check(libc.shmget(A["key"], 0, 0))
            escaped(ctypes.string_at(libc.shmat(segment, None, 0), 30))
        """,
        actors=("shared_memory",),
    ),
    Attempt(
        "message-queue",
        "receive from a POSIX message queue of the host",
        """
        queue = call("mq_open", A["queue"][1:].encode(), os.O_RDWR, 0, None)
        text = ctypes.create_string_buffer(8192)
        call("mq_timedreceive", queue, text, 8192, None, None)
        escaped(text.value)
        """,
        actors=("message_queue",),
    ),
]


@cases(ATTEMPTS)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@proofs(ATTEMPTS)
def test_works_outside(attempt: Attempt, works: Check) -> None:
    works(attempt)


HOARD = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
held = {"inotify": 0, "signals": 0, "locked": 0}
while held["inotify"] < 100_000 and libc.inotify_init1(0) >= 0: held["inotify"] += 1
while held["signals"] < 200_000 and libc.sigqueue(os.getpid(), 40, 0) == 0: held["signals"] += 1
print(held, flush=True)
open("ready", "w").close()
end = time.monotonic() + 10
while time.monotonic() < end and not os.path.exists("done"):
    libc.sigqueue(os.getpid(), 40, 0)  # what others of this user give back
    time.sleep(0.001)
"""

USE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
timer = ctypes.c_void_p()
print("inotify" if libc.inotify_init1(0) >= 0 else "no inotify",
      "timer" if libc.timer_create(1, None, ctypes.byref(timer)) == 0 else "no timer")
"""


@scenario(
    "hoard-against-host",
    "take all inotify instances, queued signals and timers that the server's user has",
    proof=ALONE,
)
def test_the_host_keeps_what_is_counted_per_user(cell: Cell, folder: Path) -> None:
    with cell.box() as sandbox:
        running = sandbox.send("python3", "-c", HOARD)
        _until_ready(sandbox)
        server = None if cell.who == "root" else cell.driver.user
        ended = run_unconfined([system_python(), "-c", USE], server, folder, tty=False)
        sandbox.write("/workspace/done")
        cell.driver.wait(running)
    assert ended.output == "inotify timer\n"


@pytest.mark.needs("root")
def test_hoarding_works_outside(peer: User, folder: Path) -> None:
    """The same program without a sandbox leaves its user nothing."""
    home = folder / "home"
    home.mkdir()
    os.chown(home, peer.uid, peer.uid)
    with peer.popen(system_python(), "-c", HOARD, cwd=home, stdout=-1) as process:
        wait_for((home / "ready").exists, what="everything is taken")
        ended = run_unconfined([system_python(), "-c", USE], peer, home, tty=False)
        (home / "done").touch()
        process.wait(10)
    assert ended.output == "no inotify no timer\n"


@scenario(
    "hoard-against-others",
    "take them all from another sandbox",
    proof=ALONE,
    stands={"landlock-user": COUNTED, "docker": COUNTED_1000},
)
def test_another_sandbox_keeps_what_is_counted_per_user(cell: Cell) -> None:
    with cell.box() as other, cell.box() as sandbox:
        before = other.exec("python3", "-c", USE)["out"]
        running = sandbox.send("python3", "-c", HOARD)
        _until_ready(sandbox)
        # More than once: another test of this user may give something back at the first look.
        after = {other.exec("python3", "-c", USE)["out"] for _ in range(3)}
        sandbox.write("/workspace/done")
        cell.driver.wait(running)
    assert "timer" in before.split() and after == {before}


def _until_ready(sandbox: Sandbox) -> None:
    wait_for(
        lambda: "ready" in sandbox.ask("list", "/workspace")["names"], what="everything is taken"
    )


@scenario(
    "same-uid",
    "run under the same uid of the host as another sandbox",
    proof="it is the host that tells the uids apart",
    stands={
        "namespaces-user": ONE_UID,
        "landlock-user": ONE_UID,
        "docker": NO_USERNS,
        "gvisor": SENTRY,
    },
)
def test_two_sandboxes_share_no_uid(cell: Cell, folder: Path) -> None:
    with cell.box() as sandbox, cell.box() as second:
        uids = []
        for each in (sandbox, second):
            with neighbour(cell.scene(folder, each)) as acting:
                uids.append(Path(f"/proc/{acting.args['pid']}").stat().st_uid)
    assert uids[0] != uids[1] and not {0, os.getuid()} & set(uids)
