"""What this process runs in: a container, of whose engine, with which limits; or a machine.

All of it is read from files, so that another machine's are as good as this one's in a test. What
cannot be read is unknown, and never an error: a container may mask any of it.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

SYS_ADMIN = 1 << 21
_ENOUGH = 1 << 60  # version 1 of cgroups says "no limit" as a number


class Kind(StrEnum):
    MACHINE = "no container"
    DOCKER = "Docker"
    PODMAN = "Podman"
    KUBERNETES = "Kubernetes"
    LXC = "LXC"
    NSPAWN = "systemd-nspawn"
    GVISOR = "gVisor"
    WSL = "WSL"
    CONTAINER = "a container"  # of an engine that leaves no name


_PIDS_LIMIT = {
    Kind.DOCKER: " (docker run --pids-limit)",
    Kind.PODMAN: " (podman run --pids-limit)",
    Kind.KUBERNETES: " (the kubelet's podPidsLimit)",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be used here besides what the machine has. None: no limit is to be seen."""

    memory: int | None = None
    cpus: float | None = None
    processes: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.memory is not None:
            parts.append(f"{self.memory / 2**20:.0f} MiB of memory")
        if self.cpus is not None:
            parts.append(f"{self.cpus:g} CPU{'' if self.cpus == 1 else 's'}")
        if self.processes is not None:
            parts.append(f"{self.processes} processes")
        return ", ".join(parts) or "no limits of its own"


@dataclass(frozen=True, slots=True)
class Surroundings:
    kind: Kind = Kind.MACHINE
    rootless: bool = False  # root here is somebody else outside
    admin: bool = False  # has CAP_SYS_ADMIN
    masked_proc: bool = (
        False  # parts of /proc are hidden or read-only: then no other can be mounted
    )
    filtered: bool = False  # by seccomp, like everything in the container
    apparmor: str = ""  # the profile that confines us; "": none does
    cgroups: int = 0  # the version that has the controllers; 0: none is mounted
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def contained(self) -> bool:
        return self.kind not in (Kind.MACHINE, Kind.WSL)

    def __str__(self) -> str:
        if not self.contained:
            return str(self.kind)
        return f"{self.kind}{' without root' if self.rootless else ''}: {self.bounds}"


def find(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Surroundings:
    """`root`: where /proc, /sys and /run are. Blocks."""
    status = _fields(_read(root / "proc/self/status"))
    uid_map = _read(root / "proc/self/uid_map").split()
    kind = _kind(root, env)
    mounts = _mounts(root)
    return Surroundings(
        kind,
        rootless=kind is not Kind.GVISOR and len(uid_map) >= 3 and uid_map[1] != "0",
        admin=bool(int(status.get("CapEff", "0"), 16) & SYS_ADMIN),
        masked_proc=any(each.point.startswith("/proc/") for each in mounts),
        filtered=status.get("Seccomp") == "2",
        apparmor=_apparmor(root),
        cgroups=_version(mounts),
        bounds=find_bounds(root),
    )


def _kind(root: Path, env: Mapping[str, str]) -> Kind:
    """The innermost one: a container in WSL is a container."""
    if (root / "proc/sentry-meminfo").exists() or "gvisor" in _read(root / "proc/cmdline"):
        return Kind.GVISOR
    if "KUBERNETES_SERVICE_HOST" in env or (root / "run/secrets/kubernetes.io").exists():
        return Kind.KUBERNETES
    if not _has_devices(root):
        if (root / "run/.containerenv").exists():
            return Kind.PODMAN
        if (root / ".dockerenv").exists():
            return Kind.DOCKER
    name = _read(root / "run/systemd/container").strip() or env.get("container", "")
    if name:
        named = {"lxc": Kind.LXC, "systemd-nspawn": Kind.NSPAWN, "podman": Kind.PODMAN}
        known = {**named, "docker": Kind.DOCKER, "wsl": Kind.WSL}
        return known.get(name, Kind.CONTAINER)
    if re.search(r"/(docker|kubepods|libpod|crio|containerd)\b", _read(root / "proc/1/cgroup")):
        return Kind.CONTAINER
    release = _read(root / "proc/sys/kernel/osrelease").lower()
    return Kind.WSL if "microsoft" in release else Kind.MACHINE


def _version(mounts: Iterable[_Mount]) -> int:
    if any(each.type == "cgroup" and "memory" in each.options for each in mounts):
        return 1
    return 2 if any(each.type == "cgroup2" for each in mounts) else 0


def _apparmor(root: Path) -> str:
    label = _read(root / "proc/self/attr/apparmor/current") or _read(
        root / "proc/self/attr/current"
    )
    name, _, mode = label.strip("\0\n ").partition(" (")
    return name if mode.startswith(("enforce", "mixed", "kill")) else ""


def _has_devices(root: Path) -> bool:
    """The machine's own /dev, which no container is given: a disk that was made from an image has
    what its engine left in it."""
    return any(each.point == "/dev" and each.type == "devtmpfs" for each in _mounts(root))


def find_bounds(root: Path = Path("/")) -> Bounds:
    """Of our own cgroups and of those above, as far as they can be seen. Blocks."""
    memory: list[float] = []
    cpus: list[float] = []
    processes: list[float] = []
    for group in _groups(root):
        memory += _numbers(group, "memory.max", "memory.limit_in_bytes")
        memory += _of_all_above(group / "memory.stat")
        processes += _numbers(group, "pids.max")
        cpus += _cpus(group)
    return Bounds(
        memory=_least(memory),
        cpus=min(cpus, default=None),
        processes=_least(processes),
    )


def exhausted() -> str:
    """As `look_for_exhausted`; of now, or of less than a second ago: a program can have it asked
    as often as it likes."""
    global _exhausted
    now = time.monotonic()
    if now - _exhausted[0] > 1.0:
        _exhausted = now, look_for_exhausted()
    return _exhausted[1]


_exhausted = (-math.inf, "")


def look_for_exhausted(root: Path = Path("/")) -> str:
    """Asked when no process could be made: the limit around us that is reached, and what to do;
    "" if none is. A few may have ended since. Blocks."""
    for group in _groups(root):
        used, most = _numbers(group, "pids.current"), _numbers(group, "pids.max")
        if used and most and used[0] >= 0.9 * most[0] - 1:
            kind = _kind(root, os.environ)
            whose = "the server's cgroup" if kind is Kind.MACHINE else "the container"
            return (
                f"{whose} has {used[0]:.0f} of the {most[0]:.0f} processes that it may have: "
                f"delete sandboxes, or raise its limit{_PIDS_LIMIT.get(kind, '')}"
            )
    return ""


def usable_cpus() -> int:
    """Cores that we may run on, or what a limit allows of them; at least one. Blocks."""
    limit = find_bounds().cpus
    cores = len(os.sched_getaffinity(0))
    return max(1, cores if limit is None else min(cores, round(limit)))


def usable_memory() -> int:
    """The machine's, or what a limit allows of it. Blocks."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = find_bounds().memory
    return physical if limit is None else min(physical, limit)


@dataclass(frozen=True, slots=True)
class _Mount:
    within: str  # what of its file system is mounted
    point: str
    type: str
    options: frozenset[str]


def _mounts(root: Path) -> list[_Mount]:
    found = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        left, right = head.split(), tail.split()
        if len(left) >= 5 and right:
            options = frozenset(right[-1].split(","))
            found.append(_Mount(left[3], left[4], right[0], options))
    return found


def _groups(root: Path) -> Iterator[Path]:
    """The folders of our own cgroups, each followed by those above it."""
    own: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        own |= dict.fromkeys(controllers.split(","), path)
    for mount in _mounts(root):
        if mount.type not in ("cgroup", "cgroup2"):
            continue
        names = mount.options & own.keys() if mount.type == "cgroup" else own.keys() & {""}
        for name in sorted(names)[:1]:
            top = root / mount.point.lstrip("/")
            yield from _upwards(top, _below(own[name], mount.within))


def _below(path: str, within: str) -> str:
    """A container sees its own cgroup at the top, under whatever name it has outside."""
    inside = path.removeprefix(within.rstrip("/"))
    return inside.lstrip("/") if path == within or inside != path or within == "/" else ""


def _upwards(top: Path, inside: str) -> Iterator[Path]:
    parts = [part for part in inside.split("/") if part not in ("", ".", "..")]
    for count in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:count])


def _numbers(group: Path, *names: str) -> list[float]:
    words = (_read(group / name).strip() for name in names)
    return [float(word) for word in words if word.isdigit()]


def _of_all_above(stat: Path) -> list[float]:
    """Version 1 counts limits here that cannot be seen from inside."""
    words = _read(stat).split()
    name = "hierarchical_memory_limit"
    return [float(words[words.index(name) + 1])] if name in words else []


def _cpus(group: Path) -> list[float]:
    quota, period = [*_read(group / "cpu.max").split(), "", ""][:2]
    quota = quota or _read(group / "cpu.cfs_quota_us").strip()
    period = period or _read(group / "cpu.cfs_period_us").strip()
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() else []


def _least(values: Iterable[float]) -> int | None:
    found = min(values, default=_ENOUGH)
    return None if found >= _ENOUGH else int(found)


def _fields(status: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in status.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
