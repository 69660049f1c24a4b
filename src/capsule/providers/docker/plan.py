"""From a spec to the container that the Engine is asked for, and to what its agent is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capsule.model import MIB, MOUNTS, WORKSPACE, Limits, User
from capsule.providers.docker import hardening
from capsule.providers.docker.probe import Facts, Runtime
from capsule.providers.local.views import visible_cpus

PERIOD = 100_000  # microseconds over which a share of CPU is counted
LEAST_QUOTA = 1000  # below which the kernel takes none

# The agent's own: itself, its stand-in for pid 1, and a shepherd, which an exec has or which waits
# for the next. The child that is forked ahead for file operations is not among them: it is not
# always there, and programs would get its place.
AGENT_TASKS = 3
# gVisor's kernel is a process whose threads the Engine counts, and whose memory it charges.
SENTRY_TASKS = 1024
SENTRY_MEMORY = 64 * MIB
# An exec takes it 10 ms of CPU: at half a core several in a row would wait for the next period.
SENTRY_PERIOD = 250_000

# What a box may write to, by its name on a disk and in layers.
TARGETS = {"workspace": WORKSPACE, "tmp": "/tmp", "var-tmp": "/var/tmp", "root": "/root"}

LABEL_ID = "capsule.id"
LABEL_OWNER = "capsule.owner"
LABEL_CREATED = "capsule.created"
LABEL_BOX = "capsule.box"  # JSON: what a server that knows nothing else needs to adopt it


@dataclass(frozen=True, slots=True)
class Mounted:
    """How the agent and its folder come into a container; the transport says it."""

    mounts: Sequence[Mapping[str, Any]] = ()
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    entrypoint: str = "/.capsule/agent"


@dataclass(frozen=True, slots=True)
class Parts:
    """What was decided and prepared for this box."""

    id: str
    image: str
    hostname: str
    limits: Limits
    runtime: Runtime
    cpus: tuple[int, ...]
    filter: bytes  # for programs, compiled
    profile: Mapping[str, Any] | str | None  # for the container; see hardening.security_options
    mounted: Mounted
    labels: Mapping[str, str]
    volumes: Sequence[str] = ()  # paths that the image wants volumes at
    # Folders of its disk and where they go; None: it has none, and what it writes is in memory.
    disk: Mapping[str, str] | None = None
    over_layers: bool = False  # that disk lies over layers
    shared: Sequence[Mapping[str, Any]] = ()  # mounts of volumes that outlive it
    user: User = field(default_factory=User)
    podman: bool = False
    sudo: bool = False


def container(parts: Parts, found: Facts) -> dict[str, Any]:
    """The body of the Engine's create."""
    limits, disks = parts.limits, in_memory(parts)
    tmpfs = {
        "/dev/shm": hardening.shared_memory(limits.memory // 2),
        **{disk.path: disk.options for disk in disks},
        **parts.mounted.tmpfs,
    }
    ulimits = list(hardening.HOST_CONFIG["Ulimits"])
    if found.kind == "Podman":
        tmpfs = {path: hardening.for_podman(options) for path, options in tmpfs.items()}
        ulimits += hardening.PODMAN_ULIMITS
    host: dict[str, Any] = {
        **hardening.HOST_CONFIG,
        "Ulimits": ulimits,
        "Runtime": parts.runtime.name,
        "SecurityOpt": hardening.security_options(parts.profile),
        "Tmpfs": tmpfs,
        "Mounts": [
            *parts.mounted.mounts,
            *(bind(*pair) for pair in (parts.disk or {}).items()),
            *_home(parts),
            *parts.shared,
        ],
        **counted(parts, found),
    }
    return {
        **hardening.CONFIG,
        "Image": parts.image,
        "Hostname": parts.hostname,
        "Entrypoint": [parts.mounted.entrypoint],
        "Env": [f"CAPSULE_BOX={json.dumps(box(parts))}"],
        "Labels": dict(parts.labels),
        "HostConfig": host,
    }


def counted(parts: Parts, found: Facts) -> dict[str, int]:
    """What the Engine counts, and can change while the container runs."""
    limits, gvisor = parts.limits, parts.runtime.gvisor
    memory = limits.memory + sum(disk.size for disk in in_memory(parts))
    tasks = limits.processes + AGENT_TASKS
    values: dict[str, int] = {}
    if "memory" in found.limits:
        memory += SENTRY_MEMORY if gvisor else 0
        values |= {"Memory": memory, "MemorySwap": memory}
    if "cpus" in found.limits:
        period = SENTRY_PERIOD if gvisor else PERIOD
        values |= {"CpuPeriod": period, "CpuQuota": max(int(limits.cpus * period), LEAST_QUOTA)}
    if "processes" in found.limits:
        values["PidsLimit"] = max(tasks, SENTRY_TASKS) if gvisor else tasks
    return values


def adjusted(parts: Parts, found: Facts, limits: Limits) -> dict[str, int] | None:
    """The Engine's update that gives a living container other limits. None: not these.

    What its agent was told at the start stays: open files, the cores of programs, and where the
    cgroup does not count all by itself (gVisor, disks in memory) the memory of each program.
    """
    was = parts.limits
    told = replace(was, memory=limits.memory, cpus=limits.cpus, processes=limits.processes)
    same_cores = visible_cpus(limits, found.cpus) == visible_cpus(was, found.cpus)
    if parts.runtime.gvisor or parts.disk is None or found.kind == "Podman":
        return None
    if told != limits or not same_cores:
        return None
    return counted(replace(parts, limits=limits), found)


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    size: int
    inodes: int
    mode: int = 0o1777

    @property
    def options(self) -> str:
        return hardening.tmpfs(self.size, self.inodes, self.mode)


def bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    # A mount, not a bind: the Engine refuses a source that it cannot see instead of making it up.
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def volume(name: str, target: str, *, read_only: bool) -> dict[str, Any]:
    """Nothing that an image has at `target` is copied into it."""
    return {
        "Type": "volume",
        "Source": name,
        "Target": target,
        "ReadOnly": read_only,
        "VolumeOptions": {"NoCopy": True},
    }


def _home(parts: Parts) -> Iterator[dict[str, Any]]:
    """A home with another name is the same folder once more."""
    for source, target in (parts.disk or {}).items():
        if target == WORKSPACE != parts.user.home:
            yield bind(source, parts.user.home)


def in_memory(parts: Parts) -> list[Disk]:
    """Every tmpfs that programs can write to: all that is writable where the box has no disk.

    Mounts cannot share one tmpfs, so /tmp, /var/tmp and /root have a part of the disk's size each,
    beside it, and /workspace, where the home has another name. What an image declares as a volume
    would have no size at all: it is covered.
    """
    size, inodes = parts.limits.disk, parts.limits.inodes
    part, few = max(size // 8, MIB), max(inodes // 8, 64)
    disks = [
        Disk(parts.user.home, size, inodes, 0o755),
        *([Disk(WORKSPACE, part, few, 0o755)] if parts.user.home != WORKSPACE else []),
        Disk("/tmp", max(size // 2, MIB), inodes),
        Disk("/var/tmp", part, few),
        Disk("/root", part, few, 0o700),
    ]
    taken = {disk.path for disk in disks}
    covers = [Disk(path, MIB, 64) for path in parts.volumes if path not in taken]
    return covers if parts.disk is not None else disks + covers


def places(parts: Parts) -> dict[str, str]:
    """What is saved, and where it is. In memory the home is not /workspace, but all there is; and
    Podman gives /root's to nobody but root."""
    if parts.disk is not None:
        return TARGETS
    lost = {"root"} if parts.podman else set[str]()
    kept = {name: path for name, path in TARGETS.items() if name not in lost}
    return {**kept, "workspace": parts.user.home}


def box(parts: Parts) -> dict[str, Any]:
    """CAPSULE_BOX: what the agent is told (spec/launch.md)."""
    return {
        "id": parts.id,
        "dir": "/.capsule",
        "isolation": "container",
        "hostname": parts.hostname,
        "uid": hardening.UID,
        "gid": hardening.GID,
        "user": {"mode": "uid"},
        "rlimits": rlimits(parts),
        "cpus": list(parts.cpus),
        "landlock": {"abi": 0, "scope": True, "rules": landlock(parts)},
        "filter": parts.filter.hex(),
        # gVisor takes as long to load a filter as to fork: whoever forks has it already.
        "filter_ahead": parts.runtime.gvisor,
        "signal_resize": parts.runtime.gvisor,  # gVisor tells no program of it
        "mounts": [
            {"type": "disk", "from": name, "to": path.removeprefix("/")}
            for name, path in places(parts).items()
        ],
        "home": parts.user.home,
        **({"no_root": hardening.NO_ROOT} if parts.runtime.gvisor else {}),
        **({"sudo": True} if parts.sudo else {}),
        **({"layers": True} if parts.over_layers else {}),
        "volumes": [{"to": str(each["Target"]).removeprefix("/")} for each in parts.shared],
    }


def landlock(parts: Parts) -> list[list[str]]:
    """What is no folder of the disk's needs a rule of its own: volumes, and a home in memory."""
    targets = [str(each["Target"]) for each in parts.shared]
    apart = [path for path in targets if path.startswith(f"{MOUNTS}/")]
    if parts.disk is None and parts.user.home != WORKSPACE:
        apart.append(parts.user.home)
    return [*(list(rule) for rule in hardening.LANDLOCK), *([path, "rw"] for path in apart)]


def rlimits(parts: Parts) -> dict[str, int]:
    limits = parts.limits
    values = {
        "nofile": limits.open_files,
        "core": hardening.NO_CORE,
        # A disk of its own is full before this: ENOSPC is what programs understand.
        "fsize": limits.disk + MIB,
    }
    if parts.disk is None or parts.runtime.gvisor:
        # What is written counts as memory, so the container has more of it than programs may. In
        # gVisor a program that takes too much is better told so than the whole box ended.
        values["data"] = limits.memory
    # gVisor's kernel is the box's own: what is counted per user is counted for this box alone, and
    # one more than the limit is let through. Of the host's, boxes share the uid; there the cgroup
    # counts processes.
    if parts.runtime.gvisor:
        return values | {"nproc": max(limits.processes - 1, 1)}
    return values | hardening.PER_USER
