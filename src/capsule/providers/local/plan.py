"""The launch request: everything security-relevant about a box, in one place to read.

`request` puts it together; the tables above it are what a box is made of. The agent carries it out
word for word (spec/launch.md). Paths in `mounts` that start with a slash are the host's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capsule import surroundings
from capsule.model import (
    MIB,
    MOUNTS,
    WORKSPACE,
    Isolation,
    Limits,
    Unenforced,
    User,
    VolumeMount,
)
from capsule.providers.local import views
from capsule.providers.local.disk import DIRS
from capsule.providers.local.probe import UID_BASE, UID_COUNT, UID_SLOTS, Facts
from capsule.providers.local.skeleton import DEVICES, SYSTEM_DIRS, copied_paths
from capsule.providers.local.volumes import Place

UID = GID = 1000

# What else a user without cgroups may start later, other sandboxes above all, before a program
# that forks is made to wait for it.
NEIGHBOURS = 4096

NO_ROOT = "no program is root at this isolation level, which has no user namespaces"

# What the kernel tells every process in /proc about the host, its devices and its other users.
# Most is readable by root alone; a mask holds even where that is not so.
MASKED = (
    "acpi", "asound", "buddyinfo", "cmdline", "config.gz", "consoles", "diskstats", "driver",
    "interrupts", "iomem", "ioports", "kallsyms", "kcore", "key-users", "keys", "kmsg",
    "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "locks", "modules", "mtrr",
    "pagetypeinfo", "partitions", "pressure", "sched_debug", "scsi", "slabinfo", "softirqs",
    "sysrq-trigger", "timer_list", "timer_stats", "vmallocinfo", "vmstat", "zoneinfo",
)  # fmt: skip

READ_ONLY = ("bus", "fs", "irq", "sys")

# Counted per user, and where users nest also for whoever made the namespace: little of each, so
# that one box leaves the others and the host theirs. Queued signals are also what timers need.
PER_USER = {"sigpending": 1024, "msgqueue": 256 * 1024, "memlock": MIB}

# Inside, the mounts already decide; Landlock stands behind them should one of them be wrong.
LANDLOCK_INSIDE = (
    ("/", "rx"),
    ("/proc", "r"),
    ("/dev", "dev"),
    ("/dev/shm", "rw"),
    (WORKSPACE, "rw"),
    ("/tmp", "rw"),
    ("/var/tmp", "rw"),
    ("/root", "rw"),
)


@dataclass(frozen=True, slots=True)
class Root:
    """What a box sees as /: layers, topmost first, and host directories mounted on top."""

    layers: tuple[Path, ...]
    binds: tuple[str, ...] = ()

    def mount(self) -> dict[str, Any]:
        if len(self.layers) == 1:
            return {"type": "bind", "from": str(self.layers[0]), "to": "", "ro": True}
        # Without userxattr a user namespace does not see what the layers' marks delete.
        lower = [_escaped(layer) for layer in self.layers]
        return {"type": "overlay", "to": "", "lower": lower, "options": "userxattr"}


def _escaped(path: Path) -> str:
    """Overlay takes its layers as one text, in which these characters separate."""
    return re.sub(r"([\\:,])", r"\\\1", str(path))


@dataclass(frozen=True, slots=True)
class Parts:
    """What was prepared for this box."""

    id: str
    unique: str  # the id, made unique on the whole host: servers share cgroups and data directories
    hostname: str
    limits: Limits
    dir: Path
    stage: Path
    spool: Path
    disk: dict[str, Any]
    cpus: tuple[int, ...]
    root: Root | None = None  # None and None: the landlock level, which sees the host's own
    view: Path | None = None
    layers: tuple[Path, ...] = ()  # what the disk begins from, topmost first
    volumes: tuple[tuple[Place, VolumeMount], ...] = ()
    volumes_folder: Path | None = None  # that they are below
    unenforced: tuple[Unenforced, ...] = ()  # what its volumes lack
    adjustable: bool = False
    user: User = field(default_factory=User)
    sudo: bool = False


def request(level: Isolation, parts: Parts, facts: Facts) -> dict[str, Any]:
    backing = parts.disk["kind"]
    namespaces = level is Isolation.NAMESPACES
    plan: dict[str, Any] = {
        "id": parts.id,
        "dir": str(parts.dir),
        "spool": str(parts.spool),
        "isolation": level.value,
        "hostname": parts.hostname,
        "uid": UID if namespaces or facts.uid_ranges else facts.uid,
        "gid": GID if namespaces or facts.uid_ranges else facts.gid,
        "user": user(level, facts),
        "home": parts.user.home,
        "disk": parts.disk,
        "disk_dirs": [list(each) for each in DIRS],
        "cgroups": facts.cgroups.entries(
            parts.unique, parts.limits, memory=charged_memory(parts.limits, backing)
        ),
        "cgroup_version": facts.cgroups.version,
        "rlimits": rlimits(level, parts.limits, facts, backing),
        "cpus": list(parts.cpus),
        "landlock": landlock(level, parts, facts),
    }
    if not facts.cgroups.enforces("memory"):
        memory = parts.limits.memory
        plan["memory_watch"] = {
            "limit": memory,
            "disk": charged_memory(parts.limits, backing) - memory,
            "of": _memory_of_all(),
        }
    if parts.adjustable:
        # Nobody could raise them later. The cgroup counts processes; each program gets `nofile`.
        plan["rlimits"].pop("nproc", None)
        plan["open_files"] = plan["rlimits"].pop("nofile")
    if namespaces:
        plan |= {"stage": str(parts.stage), "mounts": mounts(parts, facts)}
        if parts.sudo:
            plan["sudo"] = True
        if parts.layers:
            plan["layers"] = [str(layer) for layer in parts.layers]
        if parts.volumes:
            plan["volumes"] = [
                {**_place(place), "to": each.path.lstrip("/"), "ro": each.read_only}
                for place, each in parts.volumes
            ]
            plan["volumes_folder"] = str(parts.volumes_folder)
    else:
        plan |= {"paths": paths(parts), "no_root": NO_ROOT}
    return plan


def _place(place: Place) -> dict[str, str]:
    mounted = {"image": str(place.image), "point": str(place.point)} if place.image else {}
    return {"from": str(place.folder), **mounted}


def user(level: Isolation, facts: Facts) -> dict[str, Any]:
    if facts.uid_ranges:
        mode = "range" if level is Isolation.NAMESPACES else "uid"
        return {"mode": mode, "base": UID_BASE, "count": UID_COUNT, "slots": UID_SLOTS}
    return {"mode": "single" if level is Isolation.NAMESPACES else "none"}


def mounts(parts: Parts, facts: Facts) -> list[dict[str, Any]]:
    assert parts.root is not None and parts.view is not None
    return [
        parts.root.mount(),
        *(_bind(f"/{name}", name) for name in parts.root.binds),
        *({**_bind(f"/dev/{name}", f"dev/{name}"), "dev": True, "ro": False} for name in DEVICES),
        {"type": "proc", "to": "proc"},
        *(_bind(f"{parts.view}/{name}", f"proc/{name}") for name in views.FILES),
        *(_mask(name, parts.view) for name in _present(MASKED)),
        *({"type": "ro", "to": f"proc/{name}"} for name in _present(READ_ONLY)),
        _bind(f"{parts.view}/sys", "sys"),
        {"type": "devpts", "to": "dev/pts"},
        _tmpfs("dev/shm", _shm_size(parts.limits, facts)),
        {"type": "disk", "from": "workspace", "to": WORKSPACE.lstrip("/")},
        {"type": "disk", "from": "tmp", "to": "tmp"},
        {"type": "disk", "from": "var-tmp", "to": "var/tmp"},
        {"type": "disk", "from": "root", "to": "root"},
        *_home(parts.user),
        *([_tmpfs(MOUNTS.lstrip("/"), MIB, mode=0o755)] if _mounted(parts) else []),
    ]


def _mounted(parts: Parts) -> list[str]:
    """Volumes that are not below the sandbox's own folder."""
    return [each.path for _, each in parts.volumes if each.path.startswith(f"{MOUNTS}/")]


def _home(user: User) -> list[dict[str, Any]]:
    """The same folder by a second name."""
    if user.home == WORKSPACE:
        return []
    return [{"type": "disk", "from": "workspace", "to": user.home.lstrip("/"), "again": True}]


def _mask(name: str, view: Path) -> dict[str, Any]:
    """No file system of its own: what each one costs, its box and the kernel's bookkeeping over
    all of them, is more than all else of a mount."""
    mask = {"type": "mask", "to": f"proc/{name}"}
    return {**mask, "from": f"{view}/empty"} if name in _folders(MASKED) else mask


def _bind(source: str, to: str) -> dict[str, Any]:
    return {"type": "bind", "from": source, "to": to, "ro": True}


def _tmpfs(to: str, size: int, *, mode: int = 0o1777) -> dict[str, Any]:
    return {"type": "tmpfs", "to": to, "size": size, "inodes": 4096, "mode": mode}


@functools.cache
def _present(names: tuple[str, ...]) -> list[str]:
    """Every kernel has its own set of these files; a box's /proc has the same as ours."""
    return [name for name in names if os.path.lexists(f"/proc/{name}")]


@functools.cache
def _folders(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if os.path.isdir(f"/proc/{name}"))


def _shm_size(limits: Limits, facts: Facts) -> int:
    """Charged to the box's memory where there is a cgroup, so half of it is safe to offer."""
    half = limits.memory // 2
    return half if facts.cgroups.enforces("memory") else min(half, 64 * MIB)


def charged_memory(limits: Limits, backing: str) -> int:
    """Pages of a tmpfs count as memory: what is on the disk must not kill the programs."""
    return limits.memory + limits.disk if backing == "tmpfs" else limits.memory


def rlimits(level: Isolation, limits: Limits, facts: Facts, backing: str) -> dict[str, int]:
    # At 0 a core is still made where the host pipes cores to a program; at 1 the kernel makes none.
    # A disk of its own is full before this: ENOSPC is what programs understand, SIGXFSZ kills them.
    largest = limits.disk + (0 if backing == "dir" else MIB)
    values = {"nofile": limits.open_files, "core": 1, "fsize": largest, **PER_USER}
    if level is Isolation.NAMESPACES or facts.uid_ranges:
        # Where the box has one uid for everything, its pid 1 is counted as well.
        values["nproc"] = limits.processes + (0 if facts.uid_ranges else 1)
    elif counts_tasks(level, facts):
        # The kernel counts all that this user runs: too much for one box, but a bomb has an end.
        values["nproc"] = limits.processes + own_tasks() + NEIGHBOURS
    if backing == "tmpfs" or not facts.cgroups.enforces("memory"):
        values["data"] = limits.memory  # per process: the next best thing
    return values


def counts_tasks(level: Isolation, facts: Facts) -> bool:
    """Whether a request needs `own_tasks`, which blocks: make it in a thread then."""
    box_has_count = level is Isolation.NAMESPACES or facts.uid_ranges
    return not box_has_count and not facts.cgroups.enforces("pids")


def own_tasks() -> int:
    """How many threads the server's user has on this host just now."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


@functools.cache
def _memory_of_all() -> int:
    return surroundings.usable_memory()


def learn_host() -> None:
    """Looks at the host's files now, so that no launch has to. Blocks."""
    _memory_of_all()
    host_rules()
    _present(MASKED)
    _present(READ_ONLY)
    _folders(MASKED)


def landlock(level: Isolation, parts: Parts, facts: Facts) -> dict[str, Any] | None:
    if facts.landlock_abi < 1:
        return None
    rules = [list(rule) for rule in LANDLOCK_INSIDE]
    rules += [[path, "rw"] for path in _mounted(parts)]
    if level is Isolation.LANDLOCK:
        own = [[host, "rw"] for _, host in paths(parts)]
        rules = [*own, *host_rules()]
    return {"abi": facts.landlock_abi, "scope": True, "rules": rules}


@functools.cache
def host_rules() -> list[list[str]]:
    """Without namespaces, all of the host that a program may open: nothing of /proc, /sys, /home
    and /run, and of /etc only what the loader and libraries need."""
    rules = [("usr", "rx"), *((name, "rx") for name in SYSTEM_DIRS)]
    rules += ((path, "r") for path in (*copied_paths(), "etc/nsswitch.conf"))
    rules += ((f"dev/{name}", "dev") for name in DEVICES)
    return [[f"/{path}", kind] for path, kind in rules if os.path.lexists(f"/{path}")]


def paths(parts: Parts) -> list[list[str]]:
    """Where the API's paths are on the host when the box has no root of its own."""
    base = parts.disk["path"]
    return [
        [WORKSPACE, f"{base}/workspace"],
        ["/var/tmp", f"{base}/var-tmp"],
        ["/tmp", f"{base}/tmp"],
        *([[parts.user.home, f"{base}/workspace"]] if _home(parts.user) else []),
    ]
