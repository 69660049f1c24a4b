"""The agent itself: end, trace, starve or confuse the processes that hold the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.escape.actors import open_file, own_file, shared_folder
from tests.escape.attempt import CELLS, CONTAINERS, RELAYED, Attempt, Check, cases, scenario
from tests.escape.conftest import Cell
from tests.escape.machine import SERVER_SECRET, Refused, Sandbox
from tests.support import wait_for

pytestmark = pytest.mark.real


OURS = "only a sandbox has an agent; see test_host_processes for the same against a process"

# Every process of ours that a program could name: pid 1, its parent, the keeper, all root's.
PIDS = """
pids = {1, os.getppid(), A["keeper"]} - {0, os.getpid()}
try:
    for name in filter(str.isdigit, os.listdir("/proc")):
        # for a root inside, nobody of another user has a number
        if os.stat(f"/proc/{name}").st_uid == (0 if os.getuid() else 65534): pids.add(int(name))
except OSError:
    pass
def readable(*names):
    refused = None
    for pid in pids:
        for name in names:
            try:
                if os.read(os.open(f"/proc/{pid}/{name}", os.O_RDONLY), 1): escaped(f"{pid} {name}")
            except OSError as error:
                refused = error
    raise refused
"""

GVISOR = ("gvisor", "gvisor-relay")
LISTED = (
    "the Engine's /proc hides nobody: that somebody of ours runs can be seen, and how busy it is"
)
GVISORS_PROC = "gVisor shows to everybody what /proc has about a process"
NO_PRIORITIES = "gVisor lets everybody set a priority, and schedules without looking at it"

ATTEMPTS = [
    Attempt(
        "signal-agent",
        "send every signal to pid 1, the parent and the keeper, by pids, groups and pidfds",
        PIDS
        + """
sent = set()
for pid in pids:
    for number in range(1, 65):
        for send in (
            lambda: os.kill(pid, number), lambda: os.kill(-pid, number),
            lambda: signal.pidfd_send_signal(os.pidfd_open(pid), number),
        ):
            try:
                send()
                sent.add(pid)
            except OSError:
                pass
time.sleep(0.1)
say("BLOCKED", f"sent to {sent}; the agent must answer now")
""",
        proof=OURS,
    ),
    Attempt(
        "signal-all",
        "kill, stop and continue everybody, several times over",
        """
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for number in (1, 2, 15, 10, 12, 13, 14, 18) * 3:
                try: os.kill(-1, number)
                except OSError: pass
            os._exit(0)
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        time.sleep(0.2)
        """,
        proof=OURS,
        killed=True,
    ),
    Attempt(
        "signal-agent-by-descriptor",
        "have the kernel kill it as the owner of a descriptor",
        PIDS
        + """
for pid in pids:
    one, other = os.pipe()
    try:
        fcntl.fcntl(one, fcntl.F_SETOWN, pid)
        fcntl.fcntl(one, 10, signal.SIGKILL)
        fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(other, b"x")
    except OSError: pass
time.sleep(0.1)
say("BLOCKED", "the agent must answer now")
""",
        proof=OURS,
    ),
    Attempt(
        "limit-agent",
        "set its limits: no CPU time, no descriptors, no files (prlimit)",
        PIDS
        + """
changed = []
for pid in pids:
    for name in ("NOFILE", "CPU", "FSIZE", "NPROC", "AS"):
        limit = getattr(resource, "RLIMIT_" + name)
        try:
            resource.prlimit(pid, limit, (0, 0))
            changed.append((pid, limit))
        except OSError as error:
            refused = error
if changed: escaped(changed)
raise refused
""",
        proof=OURS,
    ),
    Attempt(
        "nice-agent",
        "take its priority: nice",
        PIDS
        + """
for pid in pids:
    try:
        os.setpriority(os.PRIO_PROCESS, pid, 19)
        escaped(pid)
    except OSError as error:
        refused = error
raise refused
""",
        proof=OURS,
        stands=dict.fromkeys(GVISOR, NO_PRIORITIES),
    ),
    Attempt(
        "slow-agent",
        "the same by scheduler, I/O class, CPUs",
        PIDS
        + """
changed = []
for pid in pids:
    for action in (
        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        lambda: os.sched_setaffinity(pid, [0]),
        lambda: call("ioprio_set", 1, pid, 3 << 13),
    ):
        try:
            action()
            changed.append(pid)
        except OSError as error:
            refused = error
if changed: escaped(changed)
raise refused
""",
        proof=OURS,
    ),
    Attempt(
        "trace-agent",
        "trace it, and read and write its memory",
        PIDS
        + """
space = ctypes.create_string_buffer(64)
local = struct.pack("QQ", ctypes.addressof(space), 64)
for pid in pids:
    if tried("ptrace", 0x4206, pid, 0, 0) == 0: escaped("traced")
    for address in (0x400000, 0x401000):
        remote = struct.pack("QQ", address, 64)
        if tried("process_vm_readv", pid, local, 1, remote, 1, 0) == 0: escaped("read")
        if tried("process_vm_writev", pid, local, 1, remote, 1, 0) == 0: escaped("written")
    for name in ("exe", "cwd", "root"):
        try: escaped(os.readlink(f"/proc/{pid}/{name}"))
        except OSError as error: refused = error
readable("mem", "syscall", "stack", "exe", "pagemap")
""",
        proof=OURS,
    ),
    Attempt(
        "agents-descriptors",
        "learn what it has open: /proc/PID/fd and fdinfo",
        PIDS
        + """
for pid in pids:
    for fd in range(32):
        try: escaped(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError as error: refused = error
readable("fdinfo/0")
""",
        proof=OURS,
        stands=dict.fromkeys(GVISOR, f"{GVISORS_PROC}, descriptors among them; not to open them"),
    ),
    Attempt(
        "open-agents-descriptors",
        "open what it has open, for reading and for writing, through /proc/PID/fd",
        PIDS
        + """
def harmless(path):  # what anybody may open by its name: folders, and the null device
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    return stat.S_ISDIR(mode) or stat.S_ISCHR(mode) and os.read(fd, 1) == b""
for pid in pids:
    for fd in range(64):
        for how in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            path = f"/proc/{pid}/fd/{fd}"
            try:
                os.close(os.open(path, how | os.O_NONBLOCK))
                if not harmless(path): escaped(f"{path} {os.readlink(path)}")
            except OSError as error:
                refused = error
raise refused
""",
        proof=OURS,
    ),
    Attempt(
        "agents-environment",
        "read its environment, where it was told what the sandbox is",
        PIDS
        + """
for pid in pids:
    try:
        text = open(f"/proc/{pid}/environ", "rb").read()
        if text.strip(b"\\0"): escaped(f"{pid}: {text[:80]}")
    except OSError as error:
        refused = error
""",
        proof=OURS,
    ),
    Attempt(
        "map-agent",
        "learn where its code, its stack and its data are: maps, smaps, auxv",
        PIDS + 'readable("maps", "smaps", "auxv")',
        proof=OURS,
        stands=dict.fromkeys(GVISOR, f"{GVISORS_PROC}: where things are, not what they are"),
    ),
    Attempt(
        "see-agent",
        "see that it runs, and its state: stat, status, statm, cmdline, comm",
        PIDS + 'readable("stat", "status", "statm", "cmdline", "comm")',
        proof=OURS,
        stands=dict.fromkeys((*CONTAINERS, *RELAYED), LISTED),
    ),
    Attempt(
        "steal-agents-descriptor",
        "take a descriptor of it with pidfd_getfd",
        PIDS
        + """
for pid in pids:
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        refused = error
        continue
    for fd in range(16):
        if tried("pidfd_getfd", handle, fd, 0) == 0: escaped(f"{pid} {fd}")
raise refused if "refused" in dir() else OSError(1, "refused")
""",
        proof=OURS,
    ),
    Attempt(
        "environment",
        "find something of the server's environment",
        f"""
        secret = "{SERVER_SECRET}"
        if secret in os.environ or "CAPSULE_AGENT" in os.environ: escaped(dict(os.environ))
        import glob
        for path in glob.glob("/proc/*/environ"):
            try:
                if secret.encode() in open(path, "rb").read(): escaped(path)
            except OSError:
                pass
        """,
        proof=OURS,
    ),
    Attempt(
        "overwrite-agent",
        "overwrite the agent's binary through /proc/PID/exe (CVE-2019-5736)",
        PIDS
        + """
for path in ["/proc/self/exe", *(f"/proc/{pid}/exe" for pid in pids)]:
    try:
        os.open(path, os.O_WRONLY)
        escaped(path)
    except OSError as error:
        refused = error
    try:
        if "capsule" in os.readlink(path): escaped(path)
    except OSError:
        pass
raise refused
""",
        proof="to overwrite it would harm the machine",
    ),
]


@cases(ATTEMPTS, cells=(*CELLS, *RELAYED))
def test_the_agent_stands(attempt: Attempt, holds: Check) -> None:
    """`holds` asks the agent for an exec after every attempt."""
    holds(attempt)


API = "a request to Capsule: without Capsule there is none"


@scenario(
    "cwd-descriptor",
    "name a descriptor of the agent's as working directory (CVE-2024-21626)",
    proof=API,
)
def test_no_descriptor_of_the_agents_is_a_folder(cell: Cell) -> None:
    look = "import os; print(sorted(os.listdir('.'))[:5])"
    with cell.box() as sandbox:
        for number in range(20 if cell.gvisor else 40):
            for pid in ("self", "thread-self"):
                path = f"/proc/{pid}/fd/{number}"
                with pytest.raises(Refused):
                    sandbox.exec("python3", "-c", look, cwd=path)
                    pytest.fail(f"{path} is a folder")


@scenario(
    "executable-descriptor",
    "name a descriptor of the agent's, or its binary, as the program",
    proof=API,
)
def test_no_descriptor_of_the_agents_is_a_program(cell: Cell) -> None:
    paths = [*(f"/proc/self/fd/{n}" for n in range(3, 24)), "/proc/self/exe", "/proc/1/exe"]
    with cell.box() as sandbox:
        for path in paths:
            with pytest.raises(Refused):
                ended = sandbox.exec(path, "version")
                pytest.fail(f"{path} was executed: {ended}")


@scenario(
    "api-procfs",
    "read and write /proc/self through the file API, where self is the agent's worker",
    proof=API,
)
def test_the_file_api_gives_nothing_of_its_worker(cell: Cell) -> None:
    names = ["exe", "maps", "environ", "mem", "cmdline", "auxv", "fd/3", "fd/0", "root/etc/shadow"]
    with cell.box() as sandbox:
        sandbox.ask("call", "symlink", "/workspace/me", "/proc/self")
        for name in names:
            for base in ("/proc/self", "/proc/thread-self", "/workspace/me"):
                with pytest.raises(Refused):
                    pytest.fail(f"{base}/{name}: {sandbox.read(f'{base}/{name}')[:80]}")
        for name in ("exe", "oom_score_adj", "uid_map", "attr/current"):
            with pytest.raises(Refused):
                sandbox.write(f"/proc/self/{name}", "0", append=True)


@scenario(
    "api-symlink",
    "have the file API read, write, list, change or remove a file of the host by a symlink",
    proof=API,
)
def test_the_file_api_follows_no_symlink_out(cell: Cell, folder: Path) -> None:
    with cell.box() as sandbox, own_file(cell.scene(folder, sandbox)) as secret:
        path = Path(secret.args["secret"])
        sandbox.ask("call", "symlink", "/workspace/link", str(path))
        sandbox.ask("call", "symlink", "/workspace/dir", str(path.parent))
        with pytest.raises(Refused):
            sandbox.ask("list", "/workspace/dir/")
        for reach in ("/workspace/link", f"/workspace/dir/{path.name}", str(path)):
            _attack_through_api(sandbox, reach)
        assert secret.evidence("") is None


def _attack_through_api(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(Refused):
        pytest.fail(sandbox.read(path))
    for action in (
        lambda: sandbox.write(path, "x", append=True),
        lambda: sandbox.ask("call", "chmod", path, 0o666),
        lambda: sandbox.ask("call", "move", path, "/workspace/stolen"),
        lambda: sandbox.ask("call", "remove", path),
        lambda: sandbox.write(path, "x"),
    ):
        try:
            action()
        except Refused:
            continue


SWAP = """
import os, sys, time
target, end = sys.argv[1], time.monotonic() + 3
os.mkdir("real")
os.symlink(target, "fake")
with open("real/" + sys.argv[2], "w") as file: file.write("harmless")
os.symlink("real", "switch")
libc = __import__("ctypes").CDLL(None)
open("ready", "w").close()
n = 0
while time.monotonic() < end and not os.path.exists("done"):
    n += 1
    os.symlink("fake" if n % 2 else "real", "next")
    os.rename("next", "switch")
"""


@scenario(
    "api-swap",
    "swap a folder for a symlink to the host while the file API uses it",
    proof=API,
)
def test_a_swapped_folder_leads_nowhere(cell: Cell, folder: Path) -> None:
    with cell.box() as sandbox, own_file(cell.scene(folder, sandbox)) as secret:
        path = Path(secret.args["secret"])
        running = sandbox.send("python3", "-c", SWAP, str(path.parent), path.name)
        wait_for(lambda: "ready" in sandbox.ask("list", "/workspace")["names"], what="the swaps")
        seen = ""
        for number in range(30 if cell.gvisor else 60):
            try:
                seen += sandbox.read(f"/workspace/switch/{path.name}")
                if number % 3 == 0:
                    sandbox.write(f"/workspace/switch/{path.name}", "harmless")
            except Refused:
                continue
        sandbox.write("/workspace/done")
        cell.driver.wait(running)
        assert secret.evidence(seen) is None
        assert "harmless" in seen, "it was read, at times"


@scenario(
    "api-temporary",
    "plant symlinks where the agent will write its temporary file",
    proof=API,
)
def test_a_planted_temporary_is_not_followed(cell: Cell, folder: Path) -> None:
    plant = "for n in range(2, 400): os.symlink(sys.argv[1], f'.capsule-write-{n}')"
    with cell.box() as sandbox, own_file(cell.scene(folder, sandbox)) as secret:
        sandbox.exec("python3", "-c", f"import os, sys\n{plant}", secret.args["secret"])
        for number in range(5):
            sandbox.write(f"/workspace/file{number}", "mine")
        assert secret.evidence("") is None


@scenario(
    "replace-workspace",
    "put a symlink to the host in the place of /workspace",
    proof=API,
)
def test_the_workspace_stays_the_workspace(cell: Cell, folder: Path) -> None:
    swap = """
import os, sys
here = os.getcwd()
for action in (
    lambda: os.rename(here, here + "-old"), lambda: os.rmdir(here),
    lambda: os.symlink(sys.argv[1], here), lambda: os.rename("l", here),
):
    try: action()
    except OSError: pass
"""
    with cell.box() as sandbox, shared_folder(cell.scene(folder, sandbox)) as shared:
        sandbox.exec("python3", "-c", swap, shared.args["shared"])
        try:
            sandbox.write("/workspace/escaped", "x")
        except Refused:
            pass
        assert shared.evidence("") is None


@scenario(
    "api-paths",
    "climb out by `..`, NUL bytes and odd paths through the file API",
    proof=API,
)
def test_odd_paths_lead_nowhere(cell: Cell, folder: Path) -> None:
    with cell.box() as sandbox, open_file(cell.scene(folder, sandbox)) as secret:
        path = secret.args["secret"]
        for odd in (
            f"..{path}", f"/workspace/../..{path}", f"/workspace/../../../../../..{path}",
            f"//{path}", f"/proc/self/root{path}", f"/proc/self/cwd{path}", f"/tmp/../..{path}",
            f"/workspace/./../.{path}", path,
        ):  # fmt: skip
            with pytest.raises(Refused):
                pytest.fail(f"{odd}: {sandbox.read(odd)}")


@scenario(
    "api-watch",
    "watch a folder of the host through the API",
    proof=API,
)
def test_nothing_outside_can_be_watched(cell: Cell, folder: Path) -> None:
    with cell.box() as sandbox, shared_folder(cell.scene(folder, sandbox)) as shared:
        sandbox.ask("call", "symlink", "/workspace/link", shared.args["shared"])
        for path in (shared.args["shared"], "/workspace/link"):
            with pytest.raises(Refused):
                pytest.fail(str(sandbox.ask("names_seen", path, 0.1)))


KNOCK = """
import socket, sys
for path in sys.argv[1:]:
    try:
        s = socket.socket(socket.AF_UNIX)
        s.connect(path)
        print("connected to", path)
    except OSError:
        pass
"""


@scenario(
    "agents-socket",
    "connect to the agent's socket, to another sandbox's and to the launcher's, by their paths",
    proof="whoever may connect owns the sandbox: the driver does",
)
def test_the_agents_sockets_are_out_of_reach(cell: Cell) -> None:
    with cell.box(), cell.box() as sandbox:
        run = Path(sandbox.handle["dir"]) / cell.level / "run"
        sockets = [str(path) for path in run.rglob("*.sock")]
        assert len(sockets) >= (2 if cell.container else 3), "two agents, and a launcher"
        assert sandbox.exec("python3", "-c", KNOCK, *sockets)["out"] == ""
