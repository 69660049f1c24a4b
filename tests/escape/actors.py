"""What an attempt attacks: files, processes and services of the host, and what became of them.

An actor is a context manager over a `Scene`. It yields what the program is told about it, and a
function that finds evidence of a success, independent of what the program says.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.escape.machine import Sandbox, system_python
from tests.support import wait_for
from tests.support.engine import EngineApi
from tests.support.users import User

Evidence = Callable[[str], str | None]


@dataclass(frozen=True)
class Scene:
    folder: Path  # on the host, open to everybody
    user: User  # whose processes and files they are
    sandbox: Sandbox | None  # None: nothing is confined
    level: str = ""
    shared: bool = False  # a neighbour may be one that others had before
    token: str = field(default_factory=lambda: f"token-{secrets.token_hex(8)}")

    def spawn(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """A program of the host's, as that user."""
        argv = [system_python(), "-c", code, *arguments]
        return self.user.popen(*argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd="/")

    def seen(self, output: str) -> str | None:
        return f"the output has {self.token}" if self.token in output else None


@dataclass(frozen=True)
class Acting:
    args: dict[str, Any]
    evidence: Evidence


def _owned(path: Path, user: User, mode: int) -> Path:
    path.chmod(mode)
    if os.getuid() == 0:
        os.chown(path, user.uid, user.uid)
    return path


@contextmanager
def _file(scene: Scene, name: str, mode: int) -> Iterator[Acting]:
    folder = scene.folder / f"of-{scene.user.uid}"
    folder.mkdir()
    _owned(folder, scene.user, 0o755)
    path = folder / name
    path.write_text(scene.token)
    _owned(path, scene.user, mode)
    before = path.lstat()

    def evidence(output: str) -> str | None:
        try:
            now = path.lstat()
        except FileNotFoundError:
            return "the file is gone"
        if path.read_text() != scene.token:
            return "the file was written"
        watched = ("st_mode", "st_uid", "st_gid", "st_nlink", "st_mtime_ns")
        changed = [a for a in watched if getattr(now, a) != getattr(before, a)]
        with suppress(OSError):
            changed += os.listxattr(path)
        return f"the file's {', '.join(changed)} changed" if changed else scene.seen(output)

    yield Acting({"secret": str(path)}, evidence)


def open_file(scene: Scene) -> AbstractContextManager[Acting]:
    """A file that everybody may read and write."""
    return _file(scene, "open", 0o666)


def own_file(scene: Scene) -> AbstractContextManager[Acting]:
    """One that its owner alone may read and write; with a user's server, that is who runs it."""
    return _file(scene, "own", 0o600)


@contextmanager
def shared_folder(scene: Scene) -> Iterator[Acting]:
    """A folder like /tmp."""
    path = scene.folder / "shared"
    path.mkdir()
    path.chmod(0o1777)
    (path / scene.token).touch()

    def evidence(output: str) -> str | None:
        made = sorted(set(os.listdir(path)) - {scene.token})
        return f"the folder has {made}" if made else scene.seen(output)

    yield Acting({"shared": str(path)}, evidence)


@contextmanager
def host_program(scene: Scene) -> Iterator[Acting]:
    """A script that tells the secret to whoever may execute it."""
    path = scene.folder / "tell"
    path.write_text(f"#!/bin/sh\necho {scene.token}\n")
    path.chmod(0o755)
    yield Acting({"program": str(path)}, scene.seen)


@contextmanager
def busy_folder(scene: Scene) -> Iterator[Acting]:
    """A folder in which somebody makes files all the time, whose names are secret."""
    path = scene.folder / "busy"
    path.mkdir()
    path.chmod(0o755)
    with _repeating(lambda: _come_and_go(path / scene.token)):
        yield Acting({"busy": str(path)}, scene.seen)


def _come_and_go(path: Path) -> None:
    path.touch()
    path.unlink()


@contextmanager
def busy_program(scene: Scene) -> Iterator[Acting]:
    """A program below /usr that somebody of the host opens all the time."""
    path = Path("/usr/bin/env")
    with _repeating(lambda: path.read_bytes()[:1]):
        yield Acting({"busy": str(path)}, lambda output: None)


@contextmanager
def locker(scene: Scene) -> Iterator[Acting]:
    """Somebody of the host who locks a file below /usr for himself now and then."""
    # Another one in each worker: two of them would meet.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    path = Path("/usr/bin", ("env", "cat", "head", "tail")[int(worker) % 4])
    waited: list[str] = []

    def lock() -> None:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited.append(f"the host must wait for {path}")

    with _repeating(lock):
        yield Acting({"wanted": str(path)}, lambda output: waited[0] if waited else None)


@contextmanager
def _repeating(action: Callable[[], Any]) -> Iterator[None]:
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(0.01):
            action()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


WAITING = """
import ctypes, json, os, sys, tempfile
token = os.environ["VICTIM_SECRET"].encode()
buffer = ctypes.create_string_buffer(token)
file = tempfile.TemporaryFile()
file.write(token)
file.flush()
print(json.dumps([os.getpid(), ctypes.addressof(buffer), len(token), file.fileno()]), flush=True)
sys.stdin.read()
"""


@contextmanager
def victim(scene: Scene) -> Iterator[Acting]:
    """A process with a secret in its memory, its environment and an open file without a name."""
    argv = [system_python(), "-c", WAITING]
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
    with scene.user.popen(*argv, cwd="/", env={"VICTIM_SECRET": scene.token}, **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        pid, address, length, fd = json.loads(process.stdout.readline())
        args = {"pid": pid, "address": address, "length": length, "fd": fd}
        before = _standing(pid)

        def evidence(output: str) -> str | None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)  # a kill takes a moment to show
                return "the victim is dead"
            if (now := _standing(pid)) != before:
                return f"the victim was {before}, is {now}"
            return scene.seen(output)

        try:
            yield Acting(args, evidence)
        finally:
            process.kill()


def _standing(pid: int) -> tuple[Any, ...]:
    """Whether it may run, and how much."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    limits = Path(f"/proc/{pid}/limits").read_text()
    stopped = words[0] in "Tt"
    return stopped, words[16], limits, frozenset(os.sched_getaffinity(pid))


def _serving(scene: Scene, listener: socket.socket, heard: list[str]) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        heard.append("a connection came in")
        with peer, suppress(OSError):
            peer.sendall(scene.token.encode())


@contextmanager
def _service(scene: Scene, listener: socket.socket, args: dict[str, Any]) -> Iterator[Acting]:
    heard: list[str] = []
    listener.listen(8)
    thread = threading.Thread(target=_serving, args=(scene, listener, heard))
    thread.start()
    try:
        yield Acting(args, lambda output: heard[0] if heard else scene.seen(output))
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@contextmanager
def tcp_service(scene: Scene) -> Iterator[Acting]:
    listener = socket.create_server(("127.0.0.1", 0))
    with _service(scene, listener, {"port": listener.getsockname()[1]}) as acting:
        yield acting


@contextmanager
def unix_service(scene: Scene) -> Iterator[Acting]:
    path = scene.folder / "service.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o666)
    with _service(scene, listener, {"unix": str(path)}) as acting:
        yield acting


@contextmanager
def abstract_service(scene: Scene) -> Iterator[Acting]:
    name = f"\0capsule-{secrets.token_hex(6)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    with _service(scene, listener, {"abstract": name[1:]}) as acting:
        yield acting


@contextmanager
def _mailbox(box: socket.socket, args: dict[str, Any]) -> Iterator[Acting]:
    with box:
        box.setblocking(False)

        def evidence(output: str) -> str | None:
            try:
                return f"a datagram came in: {box.recv(100)!r}"
            except BlockingIOError:
                return None

        yield Acting(args, evidence)


@contextmanager
def udp_mailbox(scene: Scene) -> Iterator[Acting]:
    box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    box.bind(("127.0.0.1", 0))
    with _mailbox(box, {"port": box.getsockname()[1]}) as acting:
        yield acting


@contextmanager
def unix_mailbox(scene: Scene) -> Iterator[Acting]:
    """Like /dev/log: everybody may send a datagram to it."""
    path = scene.folder / "log.sock"
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    box.bind(str(path))
    path.chmod(0o666)
    with _mailbox(box, {"unix": str(path)}) as acting:
        yield acting


IPC_CREAT = 0o1000
IPC_RMID = 0


@contextmanager
def shared_memory(scene: Scene) -> Iterator[Acting]:
    """System V memory and a file in /dev/shm, open to everybody, of the host's."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    key = secrets.randbelow(1 << 30) + 1
    segment = libc.shmget(key, 4096, IPC_CREAT | 0o666)
    assert segment >= 0
    at = libc.shmat(segment, None, 0)
    ctypes.memmove(at, scene.token.encode(), len(scene.token))
    libc.shmdt(ctypes.c_void_p(at))
    path = Path("/dev/shm") / f"capsule-{key}"
    path.write_text(scene.token)
    path.chmod(0o666)
    try:
        yield Acting({"key": key, "shm": str(path)}, scene.seen)
    finally:
        path.unlink()
        libc.shmctl(segment, IPC_RMID, None)


@contextmanager
def message_queue(scene: Scene) -> Iterator[Acting]:
    """A POSIX message queue of the host with a message, open to everybody."""
    library = ctypes.CDLL(None, use_errno=True)
    name = f"/capsule-{secrets.token_hex(6)}".encode()
    queue = library.mq_open(name, os.O_CREAT | os.O_RDWR, 0o666, None)
    assert queue >= 0
    try:
        os.fchmod(queue, 0o666)
        library.mq_send(queue, scene.token.encode(), len(scene.token), 0)
        yield Acting({"queue": name.decode()}, scene.seen)
    finally:
        os.close(queue)
        library.mq_unlink(name)


@contextmanager
def terminal(scene: Scene) -> Iterator[Acting]:
    """Somebody's terminal, which only its owner may open."""
    code = "import os, pty, sys; m, s = pty.openpty(); print(os.ttyname(s), flush=True)\n"
    code += "print(repr(os.read(m, 100)), flush=True)"
    with scene.spawn(code) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()

        def evidence(output: str) -> str | None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
                assert process.stdout is not None
                return f"on the terminal appeared {process.stdout.read()}"
            return None

        try:
            yield Acting({"terminal": path}, evidence)
        finally:
            process.kill()


NEIGHBOUR = """
import ctypes, os, socket, sys, time
token = os.environ["NEIGHBOUR_SECRET"].encode()
key = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def attempt(action):
    try: return action()
    except OSError: return None  # what its level does not give it, nobody can take from it
def memory():
    segment = libc.shmget(key, 4096, 0o1666)
    if segment >= 0: ctypes.memmove(libc.shmat(segment, None, 0), token, len(token))
def queue():
    q = libc.msgget(key, 0o1666)
    if q >= 0: libc.msgsnd(q, (1).to_bytes(8, "little") + token, len(token), 0)
def write(path):
    with open(path, "wb") as file: file.write(token)
    os.chmod(path, 0o666)
def serve():
    s = socket.socket(socket.AF_UNIX); s.bind("\\0capsule-" + str(key)); s.listen(8)
    return s
memory(); queue()
for place in ("/dev/shm", os.environ.get("TMPDIR", "/tmp"), "."):
    attempt(lambda: write(f"{place}/capsule-{key}"))
listener = attempt(serve)
open("ready", "w").close()
end = time.monotonic() + 10
while time.monotonic() < end and not os.path.exists("done"):
    if listener is None: time.sleep(0.01); continue
    listener.settimeout(0.05)
    try: listener.accept()[0].sendall(token)
    except OSError: pass
libc.shmctl(libc.shmget(key, 0, 0), 0, None)
libc.msgctl(libc.msgget(key, 0), 0, None)
for place in ("/dev/shm", os.environ.get("TMPDIR", "/tmp")):
    attempt(lambda: os.unlink(f"{place}/capsule-{key}"))
"""


@contextmanager
def neighbour(scene: Scene) -> Iterator[Acting]:
    """A program with secrets in every place two programs may meet: in another sandbox, where the
    attempt is in one, else a process of the same user."""
    key = secrets.randbelow(1 << 30) + 1
    secret = {"NEIGHBOUR_SECRET": scene.token}
    if scene.sandbox is None:
        with _neighbour_process(scene, key, secret) as args:
            yield Acting(args, scene.seen)
        return
    driver = scene.sandbox.driver
    with driver.box(scene.level, shared=scene.shared) as other:
        running = other.send("python3", "-c", NEIGHBOUR, str(key), env=secret)
        wait_for(lambda: "ready" in other.ask("list", "/workspace")["names"], what="the neighbour")
        disk = other.handle.get("disk_dir")
        keeper = other.handle["keeper"]  # where the host sees no programs, it stands for them
        args = {"key": key, "pid": _pid_with(scene.token) or keeper, "keeper": keeper}
        args["folder"] = f"{disk}/workspace" if disk else "/workspace"
        args["tmp"] = f"{disk}/tmp" if disk else "/tmp"
        yield Acting(args, scene.seen)
        other.write("/workspace/done")
        ended = driver.wait(running)
        assert ended["exit_code"] == 0, f"the neighbour came to harm: {ended}"


@contextmanager
def cpu_meter(scene: Scene) -> Iterator[Acting]:
    """What a container used of the CPU, as the host counts it: gVisor's own clock is not exact."""
    groups = scene.sandbox.handle["cgroups"] if scene.sandbox else []
    files = [Path(group, name) for group in groups for name in ("cpuacct.usage", "cpu.stat")]
    counters = [file for file in files if file.exists() and scene.shared]
    start, before = time.monotonic(), [_cpu_seconds(file) for file in counters]

    def evidence(output: str) -> str | None:
        spent = time.monotonic() - start
        used = [_cpu_seconds(file) - then for file, then in zip(counters, before, strict=True)]
        more = max(used, default=0.0) > 1.3 * spent + 0.1
        return f"it used {max(used):.2f} s of CPU in {spent:.2f} s" if more else None

    yield Acting({}, evidence)


def _cpu_seconds(file: Path) -> float:
    words = file.read_text().split()
    if file.name == "cpuacct.usage":
        return int(words[0]) / 1e9
    return int(words[words.index("usage_usec") + 1]) / 1e6 if "usage_usec" in words else 0.0


@contextmanager
def _neighbour_process(scene: Scene, key: int, env: dict[str, str]) -> Iterator[dict[str, Any]]:
    home = scene.folder / "neighbour"
    home.mkdir()
    _owned(home, scene.user, 0o755)
    (home / "tmp").mkdir()
    _owned(home / "tmp", scene.user, 0o755)
    env = {**env, "TMPDIR": str(home / "tmp")}
    argv = [system_python(), "-c", NEIGHBOUR, str(key)]
    try:
        with scene.user.popen(*argv, cwd=home, env=env) as process:
            wait_for((home / "ready").exists, what="the neighbour")
            yield {
                "key": key, "pid": process.pid, "keeper": 0,
                "folder": str(home), "tmp": str(home / "tmp"),
            }  # fmt: skip
            (home / "done").touch()
            process.wait(10)
    finally:
        _remove_what_it_shared(key)


def _remove_what_it_shared(key: int) -> None:
    """It does so itself, unless it was killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmctl(libc.shmget(key, 0, 0), IPC_RMID, None)
    libc.msgctl(libc.msgget(key, 0), IPC_RMID, None)
    Path(f"/dev/shm/capsule-{key}").unlink(missing_ok=True)


def _pid_with(token: str) -> int:
    """As the host sees it: the process whose environment has the token."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                return int(entry.name)
    return 0


@contextmanager
def engine(scene: Scene) -> Iterator[Acting]:
    """The Engine that made the sandbox: where it listens, and where it keeps the sandbox."""
    assert scene.sandbox is not None
    api = EngineApi(scene.sandbox.handle["engine"])
    try:
        found = api.get(f"/containers/{scene.sandbox.handle['container']}/json")
    finally:
        api.close()
    folders = [
        words for layers in found["GraphDriver"]["Data"].values() for words in layers.split(":")
    ]
    folders += [mount["Source"] for mount in found["Mounts"]]
    folders += [found[key] for key in ("ResolvConfPath", "HostnamePath", "HostsPath")]
    listening = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    words = ("docker", "containerd", "shim", "capsule")
    sockets = [path.replace("@", "\0") for path in listening if any(w in path for w in words)]
    args = {"folders": [path for path in folders if path], "sockets": sorted(set(sockets))}
    assert all(args.values())
    yield Acting(args, lambda output: None)


ACTORS: dict[str, Callable[[Scene], AbstractContextManager[Acting]]] = {
    actor.__name__: actor
    for actor in (
        open_file, own_file, shared_folder, host_program, busy_folder, busy_program, locker, victim,
        tcp_service, unix_service, abstract_service, udp_mailbox, unix_mailbox, shared_memory,
        message_queue, terminal, neighbour, engine, cpu_meter,
    )
}  # fmt: skip
