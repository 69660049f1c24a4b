"""A Docker Engine for tests: its API over plain HTTP, and a real daemon of our own.

`Engine` is a dockerd with a containerd beside it, as a service manager would run them: the second
outlives the first, so a dockerd can be killed and started again while its containers run. All that
it has lies in one folder, below one cgroup and in a network namespace of its own: a dockerd without
a bridge deletes the `docker0` of whoever shares its network. Containers have no network here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.support import IN_CI, ROOT

# Layers of images, gVisor, packages of frameworks. Outside of the clone only with CI=true.
_HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
CACHE = _HOME / "capsule-tests" if IN_CI else ROOT / ".cache/tests"
FOLDERS = "capsule-engine-"
PATIENCE = 4.0  # of providers in tests that are not about deadlines: a loaded machine is slow
# Only with `--host-uds` a socket that is bound in a mounted folder answers outside.
GVISOR = ("--network=none", "--platform=systrap")
RUNTIMES = {"runsc": (*GVISOR, "--host-uds=all"), "runsc-nouds": GVISOR}
OURS = ("dockerd", "containerd", "runc", "runsc")
CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-run"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
address = "{folder}/containerd.sock"
[ttrpc]
address = "{folder}/containerd.sock.ttrpc"
"""


class EngineMissing(Exception):
    """There is no Engine to be had, or not what is needed of it: why."""


class EngineError(Exception):
    """The Engine answered with an error."""


class Ran(NamedTuple):
    exit_code: int
    output: str


class EngineApi:
    """What tests ask an Engine besides Capsule, at a `DOCKER_HOST` like unix:///var/run/docker.sock."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = self._connected()

    def _connected(self) -> httpx.Client:
        scheme, _, rest = self.url.partition("://")
        if scheme == "unix":
            transport = httpx.HTTPTransport(uds=rest)
            return httpx.Client(transport=transport, base_url="http://docker", timeout=30)
        if scheme in ("tcp", "http"):
            return httpx.Client(base_url=f"http://{rest}", timeout=30)
        raise EngineMissing(f"the tests cannot reach an Engine at {self.url!r}")

    def reconnect(self) -> None:
        """Drop the connections to a daemon that is gone."""
        self.client.close()
        self.client = self._connected()

    def answers(self) -> bool:
        if not self._listens():
            return False
        try:
            return self.client.get("/_ping", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _listens(self) -> bool:
        """Asked first, because httpx forgets to close a Unix socket that was refused."""
        scheme, _, path = self.url.partition("://")
        if scheme != "unix":
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(path) == 0

    def call(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        """The decoded answer; None if it is empty."""
        answer = self.client.request(method, path, json=body, params=params)
        if answer.is_error:
            raise EngineError(f"{method} {path}: {answer.status_code} {answer.text.strip()}")
        return json.loads(answer.content) if answer.content else None

    def get(self, path: str, **params: Any) -> Any:
        return self.call("GET", path, **params)

    def runtimes(self) -> set[str]:
        return set(self.get("/info")["Runtimes"])

    def containers(self, label: str = "") -> list[dict[str, Any]]:
        """All of them, also what never started."""
        filters = json.dumps({"label": [label]} if label else {})
        listed: list[dict[str, Any]] = self.get("/containers/json", all=1, filters=filters)
        return listed

    def image(self, name: str) -> dict[str, Any] | None:
        answer = self.client.get(f"/images/{name}/json")
        found: dict[str, Any] | None = answer.json() if answer.is_success else None
        return found

    def load(self, archive: Iterable[bytes]) -> None:
        """Images in the format of `docker save`."""
        headers = {"content-type": "application/x-tar"}
        answer = self.client.post("/images/load", content=archive, headers=headers, timeout=120)
        if answer.is_error or '"error"' in answer.text:
            raise EngineError(f"load: {answer.status_code} {answer.text.strip()}")

    def run(self, image: str, *command: str, runtime: str = "", **config: Any) -> str:
        """Create and start a container without a network; its id."""
        host = {"NetworkMode": "none", "Runtime": runtime, **config.pop("HostConfig", {})}
        body = {"Image": image, "Cmd": command, "HostConfig": host, **config}
        made = str(self.call("POST", "/containers/create", body)["Id"])
        try:
            self.call("POST", f"/containers/{made}/start")
        except EngineError:
            self.remove(made)
            raise
        return made

    def exec(self, container: str, *command: str) -> Ran:
        body = {"Cmd": command, "AttachStdout": True, "AttachStderr": True, "Tty": True}
        made = self.call("POST", f"/containers/{container}/exec", body)["Id"]
        answer = self.client.post(f"/exec/{made}/start", json={"Tty": True})
        told = self.get(f"/exec/{made}/json")
        return Ran(told["ExitCode"], answer.text.replace("\r\n", "\n"))

    def remove(self, container: str) -> None:
        self.call("DELETE", f"/containers/{container}", force=1, v=1)

    def close(self) -> None:
        self.client.close()


class Engine:
    """A dockerd that belongs to whoever makes it. `stop` leaves nothing of it behind."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` must begin with FOLDERS and the pid of its owner; see `abandoned`."""
        self.can_be_had()
        prefix = f"{FOLDERS}{os.getpid()}-"
        self.folder = folder or Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.url = f"unix://{self.folder}/docker.sock"
        self.api = EngineApi(self.url)
        self._containerd: subprocess.Popen[bytes] | None = None
        self._dockerd: subprocess.Popen[bytes] | None = None

    @staticmethod
    def can_be_had() -> None:
        """Raises EngineMissing where this user or machine cannot start one."""
        if os.getuid() != 0:
            raise EngineMissing("only root can start a Docker Engine of its own")
        for program in ("dockerd", "containerd", "runc", "unshare"):
            if shutil.which(program) is None:
                raise EngineMissing(f"{program} is not installed (scripts/test-components does it)")

    @property
    def pid(self) -> int:
        assert self._dockerd is not None, "it was not started"
        return self._dockerd.pid

    def start(self, *, live_restore: bool = False) -> None:
        """Returns when it answers. With `live_restore` containers outlive it."""
        if self._containerd is None:
            config = self.folder / "containerd.toml"
            config.write_text(CONTAINERD.format(folder=self.folder))
            self._containerd = self._spawn(
                "containerd", "--config", str(config), "--log-level", "warn"
            )
            self._await("containerd", (self.folder / "containerd.sock").exists)
        config = self.folder / "daemon.json"
        config.write_text(json.dumps(self._config(live_restore)))
        self.api.reconnect()
        self._dockerd = self._spawn("unshare", "--net", "dockerd", "--config-file", str(config))
        self._await("dockerd", self.api.answers)

    def _config(self, live_restore: bool) -> dict[str, Any]:
        gvisor = find_runsc()
        runtimes = {
            name: {"path": str(gvisor), "runtimeArgs": list(flags)}
            for name, flags in RUNTIMES.items()
            if gvisor is not None
        }
        return {
            "data-root": f"{self.folder}/data",
            "exec-root": f"{self.folder}/exec",
            "pidfile": f"{self.folder}/dockerd.pid",
            "hosts": [self.url],
            "containerd": f"{self.folder}/containerd.sock",
            "bridge": "none",
            "iptables": False,
            "cgroup-parent": f"/{self.folder.name}",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "live-restore": live_restore,
            "log-level": "warn",
            "runtimes": runtimes,
            "shutdown-timeout": 5,
        }

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        log = self.folder / "log"
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _await(self, name: str, ready: Callable[[], bool], within: float = 60.0) -> None:
        process = self._containerd if name == "containerd" else self._dockerd
        assert process is not None
        deadline = time.monotonic() + within
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                told = (self.folder / "log").read_text(errors="replace")[-2000:]
                self.stop()
                raise EngineMissing(f"{name} did not start: {told}")
            time.sleep(0.01)

    def kill(self) -> None:
        """kill -9: its containers, their shims and containerd go on."""
        self._end(signal.SIGKILL)

    def quit(self) -> None:
        """As a service manager stops it. Without live-restore its containers are ended first."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        assert self._dockerd is not None, "it was not started"
        self._dockerd.send_signal(how)
        self._dockerd.wait(timeout=30)

    def restart(self, *, live_restore: bool = False, how: str = "quit") -> None:
        """`how` it ends before: quit or kill."""
        self.kill() if how == "kill" else self.quit()
        self.start(live_restore=live_restore)

    def stop(self) -> None:
        """For good, with everything that it ran and kept."""
        if self.api.answers():
            for container in self.api.containers():
                with suppress(EngineError):
                    self.api.remove(container["Id"])
        self.api.close()
        if self._dockerd is not None:
            self._dockerd.terminate()
            try:
                self._dockerd.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._containerd is not None:
            self._containerd.kill()  # asked nicely, it waits for shims that nobody answers
            self._containerd.wait()
        sweep(self.folder)


def find_runsc() -> Path | None:
    """gVisor: unpacked by scripts/test-components, or installed."""
    installed = shutil.which("runsc")
    candidates = [CACHE / "runsc/usr/bin/runsc", *([Path(installed)] if installed else [])]
    return next((found for found in candidates if os.access(found, os.X_OK)), None)


def abandoned() -> Iterator[Path]:
    """Folders of Engines whose owner is dead: the run that made them was killed."""
    for folder in Path("/tmp").glob(f"{FOLDERS}*"):
        owner = folder.name.removeprefix(FOLDERS).partition("-")[0]
        with suppress(FileNotFoundError):
            mine = folder.is_dir() and folder.stat().st_uid == os.getuid()
            if mine and owner.isdigit() and not Path("/proc", owner).exists():
                yield folder


def sweep(folder: Path) -> None:
    """End what an Engine in `folder` left running, and remove all that it left."""
    # Where a shim listens is not ours to choose: outside of the folder.
    shims = [path.read_text() for path in folder.glob("containerd-run/*/*/*/address")]
    for _ in range(100):
        pids = [*_processes(folder), *_members(folder)]
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
    for address in shims:
        Path(address.strip().removeprefix("unix://")).unlink(missing_ok=True)
    for cgroup in _cgroups(folder):
        with suppress(OSError):
            cgroup.rmdir()
    shutil.rmtree(folder, ignore_errors=True)


def _processes(folder: Path) -> Iterator[int]:
    """Daemons, shims and gVisor's own: all of them have the folder on their command line."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                if os.readlink(entry / "exe").rpartition("/")[2].startswith(OURS):
                    yield int(entry.name)


def _members(folder: Path) -> Iterator[int]:
    """What runs in its containers. A paused one is woken, otherwise it could not die."""
    for cgroup in _cgroups(folder):
        with suppress(OSError):
            (cgroup / "freezer.state").write_text("THAWED")
        with suppress(OSError):
            yield from map(int, (cgroup / "cgroup.procs").read_text().split())


def _cgroups(folder: Path) -> Iterator[Path]:
    """Deepest first, in every hierarchy."""
    roots = [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")]
    for root in roots:
        for path, _, _ in os.walk(root / folder.name, topdown=False):
            yield Path(path)
