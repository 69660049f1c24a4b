"""Where boxes get their cgroups, version 1 or 2, and what is written into them.

`find` reads how the machine is laid out, `prepare` makes the directory that will hold the boxes
and learns which controllers can really be used; the agent makes one directory per box below it,
puts only programs into it, and removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from capsule.model import Limits
from capsule.providers.local.scope import NEVER, Scope, user_name

CONTROLLERS = ("memory", "pids", "cpu")
OURS = 1  # the agent's forker is a member too; an rlimit counts the programs alone
V1_ONLY = ("cpuacct", "freezer")  # usage, and stopping a whole box at once; part of the core in v2
PERIOD_US = 100_000
LEAF = "capsule-server"  # where processes go that were in a cgroup which boxes are to be made in
UNITS = (".service", ".scope", ".slice")
FIX_NO_SYSTEMD = (
    "let the server begin in a cgroup of its own, with the controllers memory, pids and cpu, that"
    " its user owns; or run it as root"
)
FIX_NO_SCOPE = "log in through PAM, or `sudo loginctl enable-linger {}`, then start it again"
FIX_NEVER = "set cgroup_scope to auto"
FIX_NO_CONTROLLER = (
    "as root: systemctl edit user@.service, and add [Service] and Delegate=cpu memory pids; then"
    " log in again"
)


class Mount(NamedTuple):
    point: Path
    version: int
    options: frozenset[str]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the machine has, before anything was tried. Version 0: nothing."""

    version: int
    points: Mapping[str, Path] = field(default_factory=dict)  # v1: controller → its mount
    unified: Path | None = None  # v2: the mount
    own: str = "/"  # v2: our own cgroup, as a path below it


@dataclass(frozen=True, slots=True)
class Cgroups:
    """What can be used: for each controller the directory that boxes' cgroups are made in."""

    version: int
    bases: Mapping[str, Path] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)  # controller → why not
    fix: str = ""
    files: frozenset[str] = frozenset()  # optional settings that this kernel has
    scope: Scope | None = None  # v2 under systemd: what it gave the launcher, if it was asked

    def enforces(self, controller: str) -> bool:
        return controller in self.bases

    @property
    def freezes(self) -> bool:
        return "freezer.state" in self.files or "cgroup.freeze" in self.files

    def entries(self, box: str, limits: Limits, *, memory: int) -> list[dict[str, Any]]:
        """The `cgroups` of a launch request. `memory` is what may be charged, disk included."""
        settings = _settings_v2 if self.version == 2 else _settings_v1
        by_dir: dict[str, list[list[str]]] = {}
        for controller, base in self.bases.items():
            rows = by_dir.setdefault(f"{base}/{box}", [])
            rows += (
                [name, value]
                for name, value in settings(controller, limits, memory)
                if name in self.files
            )
        return [{"dir": at, "set": rows} for at, rows in by_dir.items()]

    def remove_lost(self, instance: str, recorded: Collection[str]) -> None:
        """Remove cgroups of boxes of which there is no record: the run directory was cleared."""
        for base in set(self.bases.values()):
            for found in base.glob(f"*-{instance}"):
                if found.name.removesuffix(f"-{instance}") not in recorded:
                    with contextlib.suppress(OSError):  # it has processes
                        found.rmdir()


def _settings_v1(controller: str, limits: Limits, memory: int) -> list[tuple[str, str]]:
    quota = _quota_us(limits)
    match controller:
        case "memory":  # memsw is memory plus swap: equal means no swap. It must not be set first.
            return [
                ("memory.limit_in_bytes", str(memory)),
                ("memory.memsw.limit_in_bytes", str(memory)),
                ("memory.swappiness", "0"),
            ]
        case "pids":
            return [("pids.max", str(limits.processes + OURS))]
        case "cpu":  # of the period that every new cgroup has
            return [
                ("cpu.cfs_quota_us", str(quota)),
                ("cpu.cfs_burst_us", str(quota)),  # what was not used lately may be used at once
            ]
    return []


def _settings_v2(controller: str, limits: Limits, memory: int) -> list[tuple[str, str]]:
    quota = _quota_us(limits)
    match controller:
        case "memory":  # one program over the limit is killed, not the box with all the others
            return [
                ("memory.max", str(memory)),
                ("memory.swap.max", "0"),
                ("memory.oom.group", "0"),
            ]
        case "pids":
            return [("pids.max", str(limits.processes + OURS))]
        case "cpu":
            return [("cpu.max", f"{quota} {PERIOD_US}"), ("cpu.max.burst", str(quota))]
    return []


def _quota_us(limits: Limits) -> int:
    return max(1000, int(limits.cpus * PERIOD_US))  # the kernel takes no quota below 1 ms


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The cgroup mounts among the lines of /proc/self/mountinfo."""
    mounts = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        left, right = head.split(), tail.split()
        if len(left) < 5 or len(right) < 3 or right[0] not in ("cgroup", "cgroup2"):
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), left[4])
        version = 2 if right[0] == "cgroup2" else 1
        mounts.append(Mount(Path(point), version, frozenset(right[2].split(","))))
    return mounts


def find(mountinfo: str, own_cgroups: str) -> Layout:
    """How this machine is laid out. Where both versions are mounted, v1 has the controllers."""
    mounts = parse_mounts(mountinfo)
    points: dict[str, Path] = {}
    for mount in mounts:
        for controller in (*CONTROLLERS, *V1_ONLY):
            if mount.version == 1 and controller in mount.options:
                points.setdefault(controller, mount.point)
    if any(controller in points for controller in CONTROLLERS):
        return Layout(1, points=points)
    unified = next((mount.point for mount in mounts if mount.version == 2), None)
    if unified is None:
        return Layout(0)
    own = next((line[3:] for line in own_cgroups.splitlines() if line.startswith("0::")), "/")
    return Layout(2, unified=unified, own=own)


def find_here() -> Layout:
    try:
        return find(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        return Layout(0)


def prepare(layout: Layout, uid: int, ask: Callable[[str], Scope] | None = None) -> Cgroups:
    """Makes what boxes need. Never raises: what does not work has its reason. Blocks.

    `ask` asks systemd for a scope, by the cgroup that the server was started in; None: another
    init runs this machine.
    """
    if layout.version == 1:
        return _prepare_v1(layout, uid)
    if layout.version == 2 and layout.unified is not None:
        return _prepare_v2(layout.unified, layout.own, uid, ask)
    missing = dict.fromkeys(CONTROLLERS, "no cgroup file system is mounted")
    return Cgroups(0, problems=missing, fix="mount cgroup2 on /sys/fs/cgroup")


def _prepare_v1(layout: Layout, uid: int) -> Cgroups:
    name = "capsule" if uid == 0 else f"capsule-{uid}"
    bases: dict[str, Path] = {}
    problems: dict[str, str] = {}
    for controller in (*CONTROLLERS, *V1_ONLY):
        point = layout.points.get(controller)
        if point is None:
            problems[controller] = f"the kernel has no {controller} controller mounted"
            continue
        problem = _claim(point / name)
        if problem is None:
            bases[controller] = point / name
        else:
            problems[controller] = problem
    fix = "" if uid == 0 else _fix_v1(layout, name, uid)
    return Cgroups(1 if bases else 0, bases, _wanted(problems), fix, _known_files(bases.values()))


def _fix_v1(layout: Layout, name: str, uid: int) -> str:
    dirs = " ".join(dict.fromkeys(str(point / name) for point in layout.points.values()))
    return f"as root: mkdir -p {dirs} && chown -R {uid} {dirs}; or run the server as root"


def _claim(base: Path) -> str | None:
    """Makes sure that boxes' cgroups can be made in `base`; else says why not."""
    try:
        base.mkdir(exist_ok=True)
    except OSError as exc:
        return f"{base} cannot be made: {exc.strerror}"
    if not os.access(base, os.W_OK):
        return f"{base} belongs to another user"
    return None


def _prepare_v2(unified: Path, own: str, uid: int, ask: Callable[[str], Scope] | None) -> Cgroups:
    begun_in = unified / own.lstrip("/")
    parent, scope = begun_in, None
    if ask is not None:
        parent, scope = _under_systemd(unified, own, uid, ask)
    elif uid == 0 and _is_root(unified):
        parent = unified
    if scope is not None and scope.why and uid and not os.access(parent, os.W_OK):
        problems = dict.fromkeys(CONTROLLERS, f"systemd gave no scope: {scope.why}")
        fix = FIX_NEVER if scope.why == NEVER else FIX_NO_SCOPE.format(user_name(uid))
        return Cgroups(0, problems=problems, fix=fix, scope=scope)
    problems = _delegate(parent)
    base = parent / "capsule"
    claimed = _claim(base)
    if claimed is not None:
        problems = dict.fromkeys(CONTROLLERS, claimed)
    else:
        _enable(base)
        for name in _disabled(base):
            problems.setdefault(name, f"{name} is not delegated to {parent}")
    bases = {name: base for name in CONTROLLERS if name not in problems}
    fix = ""
    if problems and uid:
        fix = FIX_NO_SYSTEMD if ask is None else FIX_NO_CONTROLLER
    elif problems:
        fix = f"enable the controllers in {parent}"
    return Cgroups(2 if bases else 0, bases, problems, fix, _known_files(bases.values()), scope)


def _under_systemd(
    unified: Path, own: str, uid: int, ask: Callable[[str], Scope]
) -> tuple[Path, Scope | None]:
    """What boxes are made below: the delegated unit that the server was started in, else a scope.

    systemd starts a service's next process in the service's own cgroup, which the kernel refuses
    while boxes live below it. So a service without `DelegateSubgroup=` is the last resort.
    """
    begun_in = unified / own.lstrip("/")
    unit = begun_in if begun_in.name.endswith(UNITS) else begun_in.parent
    # systemd itself makes no cgroups below units that are not delegated.
    delegated = _is_delegated(unit) or (unit != begun_in and os.access(unit, os.W_OK) and uid != 0)
    restarts = unit != begun_in or not unit.name.endswith(".service")
    if delegated and restarts and not set(CONTROLLERS) - _words(unit / "cgroup.controllers"):
        return unit, None
    scope = ask(own)
    if scope.own:
        return unified / scope.own.lstrip("/"), scope
    if delegated:
        return unit, scope
    # Beside systemd's tree, or in a cgroup that may lose its controllers: better than no limits.
    return (begun_in if uid else unified), scope


def _is_delegated(unit: Path) -> bool:
    """systemd marks what it leaves to others; for root's eyes alone before version 251."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(unit, name) == b"1":
                return True
    return False


def _is_root(cgroup: Path) -> bool:
    """The root of the machine's hierarchy: it alone may have both processes and controllers."""
    return not (cgroup / "cgroup.type").exists()


def _delegate(parent: Path) -> dict[str, str]:
    """Switch the controllers on below `parent`. What runs in it moves into a leaf first.

    The order matters. While there are processes in a cgroup the kernel refuses `+memory`, but
    accepts `+cpu` and `+pids`: these make the cgroup threaded, and then no process can enter a
    cgroup below it, and `+memory` is refused for good.
    """
    if not _disabled(parent):
        return {}
    if not _is_root(parent) and (stays := _empty(parent, parent / LEAF)):
        return dict.fromkeys(CONTROLLERS, stays)
    _enable(parent)
    return {
        name: f"the {name} controller cannot be handed down in {parent}"
        for name in _disabled(parent)
    }


def _empty(source: Path, leaf: Path) -> str:
    """Move all processes of `source` into `leaf`; why that is not possible."""
    try:
        for _ in range(10):  # a process may fork meanwhile
            found = (source / "cgroup.procs").read_text().split()
            if not found:
                return ""
            leaf.mkdir(exist_ok=True)
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    (leaf / "cgroup.procs").write_text(pid)
    except OSError as exc:
        return f"processes in {source} cannot be moved to {leaf}: {exc.strerror}"
    return f"processes in {source} do not stop forking"


def _enable(at: Path) -> None:
    for controller in CONTROLLERS:
        with contextlib.suppress(OSError):
            (at / "cgroup.subtree_control").write_text(f"+{controller}")


def _disabled(at: Path) -> list[str]:
    """The controllers that are not switched on for the children of `at`."""
    enabled = _words(at / "cgroup.subtree_control")
    return [name for name in CONTROLLERS if name not in enabled]


def _words(file: Path) -> set[str]:
    try:
        return set(file.read_text().split())
    except OSError:
        return set()


def _wanted(problems: Mapping[str, str]) -> dict[str, str]:
    return {name: why for name, why in problems.items() if name in CONTROLLERS}


def _known_files(bases: Iterable[Path]) -> frozenset[str]:
    names: set[str] = set()
    for base in set(bases):
        with contextlib.suppress(OSError):  # the launcher, and its scope, may have ended meanwhile
            names.update(os.listdir(base))
    return frozenset(names)
