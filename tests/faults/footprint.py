"""What of a server, and of its boxes, there is on this machine: the kernel's word and the store's.

Everything is found by the server's own directories, so tests may run side by side. What belongs to
other users cannot be read by an ordinary one; then less is seen, and nothing is seen wrongly.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

CGROUPS = Path("/sys/fs/cgroup")


class Process(NamedTuple):
    pid: int
    parent: int
    state: str
    name: str
    began: float  # seconds since the machine did

    def __str__(self) -> str:
        return f"{self.name}[{self.pid}] {self.state}, child of {self.parent}"


@dataclass(slots=True)
class Footprint:
    rows: dict[str, str] = field(default_factory=dict)  # id → state, in the store
    boxes: dict[str, str] = field(default_factory=dict)  # id → that of its box
    views: set[str] = field(default_factory=set)  # of boxes that share them with nobody
    folders: set[str] = field(default_factory=set)  # of boxes, below run_dir
    keepers: set[str] = field(default_factory=set)  # boxes whose socket is listened on
    cgroups: dict[str, set[str]] = field(default_factory=dict)  # by controller
    disks: set[str] = field(default_factory=set)  # folders of boxes, below data_dir
    loops: list[str] = field(default_factory=list)  # loop devices backed by data_dir
    mounts: list[str] = field(default_factory=list)  # on the host, below base
    launchers: list[str] = field(default_factory=list)  # sockets that are listened on
    strays: list[Process] = field(default_factory=list)  # of ours, and of no box that has a keeper
    zombies: list[Process] = field(default_factory=list)

    def differences(self, *, serving: bool = True) -> list[str]:
        """What does not agree with the store. Nothing, if all is well."""
        live = {self.boxes.get(id, id) for id, state in self.rows.items() if state != "failed"}
        halfway = {id: state for id, state in self.rows.items() if state not in SETTLED}
        found = [f"{id} is still {state}" for id, state in halfway.items()]
        found += differing("folders", self.folders, live)
        found += differing("keepers", self.keepers, live)
        for controller, ids in self.cgroups.items():
            found += differing(f"{controller} cgroups", ids, live)
        found += [f"disk without a row: {id}" for id in self.disks - live]
        found += [f"view without a row: {id}" for id in self.views - live]
        ahead = len(self.launchers)  # each may hold a disk for the next box: agent/ahead.c
        if len(self.loops) > len(live) + ahead:
            found.append(f"{len(self.loops)} loop devices for {len(live)} sandboxes")
        found += [f"mounted: {point}" for point in self.mounts]
        found += [f"stray: {process}" for process in self.strays]
        found += [f"zombie: {process}" for process in self.zombies]
        if len(self.launchers) != serving:
            found.append(f"launchers: {self.launchers}")
        return found


SETTLED = ("running", "failed")


def differing(what: str, found: set[str], wanted: set[str]) -> list[str]:
    return [f"{what}: {id} has no row" for id in sorted(found - wanted)] + [
        f"{what}: none for {id}" for id in sorted(wanted - found)
    ]


def look(
    base: Path,
    *,
    server: int | None,
    ignored: frozenset[int] = frozenset(),
    since: float = 0.0,
) -> Footprint:
    """`ignored` are processes of the tests themselves. What began before `since` is not ours
    either: others may have thousands of files open.
    """
    records = records_of(base)
    seen = Footprint(rows={id: state for id, state, _ in records}, views=views_of(base))
    seen.boxes = {id: body.get("box_id") or id for id, _, body in records}
    seen.folders = set(names_in(base / "run/boxes"))
    suffix = f"-{instance(base)}"
    seen.disks = {name.removesuffix(suffix) for name in names_in(base / "data/boxes")}
    sockets = dict(listeners(base))
    seen.launchers = [path for path in sockets.values() if "/launcher/" in path]
    seen.keepers = {path.split("/")[-2] for path in sockets.values() if "/boxes/" in path}
    seen.cgroups = dict(cgroups_of(base))
    seen.loops = list(loops_of(base))
    here = Path("/proc/self/mountinfo").read_text().splitlines()
    seen.mounts = [point for line in here if (point := line.split()[4]).startswith(f"{base}/run/")]
    sort_processes(seen, base, sockets, server, ignored, since)
    return seen


def records_of(base: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Of each sandbox in the store its id, its state and its body."""
    path = base / "data/capsule.db"
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as db:
        rows = db.execute("SELECT id, state, body FROM sandboxes").fetchall()
    return [(id, state, json.loads(body)) for id, state, body in rows]


def views_of(base: Path) -> set[str]:
    found = names_in(base / "run/views")
    return {name.removeprefix("own-") for name in found if name.startswith("own-")}


def names_in(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except FileNotFoundError:
        return []


def listeners(base: Path) -> Iterator[tuple[str, str]]:
    """Inode and path of every Unix socket below run_dir that somebody holds open to listen."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        # 00010000: it listens. A connection that was accepted shows its listener's path as well.
        if len(words) > 7 and words[3] == "00010000" and words[7].startswith(f"{base}/run/"):
            yield words[6], words[7]


def instance(base: Path) -> str:
    """The part of a cgroup's name that says whose it is; see providers/local/provider.py."""
    return hashlib.sha256(os.fsencode(base / "run/boxes")).hexdigest()[:8]


def cgroups_of(base: Path) -> Iterator[tuple[str, set[str]]]:
    suffix = f"-{instance(base)}"
    for parent in (*CGROUPS.glob("*/capsule*"), *CGROUPS.glob("capsule*")):
        ids = {name.removesuffix(suffix) for name in os.listdir(parent) if name.endswith(suffix)}
        if ids or any(name.endswith(suffix) for name in os.listdir(parent)):
            yield parent.parent.name, ids


def loops_of(base: Path) -> Iterator[str]:
    for name in os.listdir("/sys/block"):  # of which there may be a thousand, mostly unused
        if name.startswith("loop"):
            with suppress(OSError), open(f"/sys/block/{name}/loop/backing_file") as file:
                if file.read().startswith(f"{base}/data/"):
                    yield name


def processes() -> dict[int, Process]:
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, IndexError):
            head, _, rest = Path(f"/proc/{name}/stat").read_text().rpartition(")")
            words = rest.split()
            began = int(words[19]) / os.sysconf("SC_CLK_TCK")
            named = head.partition("(")[2]
            found[int(name)] = Process(int(name), int(words[1]), words[0], named, began)
    return found


def now() -> float:
    """As `Process.began` tells it, and a little earlier."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - 1.0


def sort_processes(
    seen: Footprint,
    base: Path,
    sockets: dict[str, str],
    server: int | None,
    ignored: frozenset[int],
    since: float,
) -> None:
    running = processes()
    # Keepers cannot be looked into, except by root; what a box's record says must do.
    keepers = set(recorded_keepers(base, sockets))
    ours: list[Process] = []
    for process in running.values():
        if process.pid in ignored or process.pid == server or process.parent == 2:
            continue
        if process.began < since:
            continue
        held = links(process.pid)
        listening = [sockets[inode] for link in held if (inode := link[8:-1]) in sockets]
        if listening:
            keepers.add(process.pid)
        elif belongs(process.pid, held, base):
            ours.append(process)
    for process in running.values():
        family = set(ancestry(process, running))
        if process.state == "Z" and (family & keepers or server in family):
            seen.zombies.append(process)
    seen.strays = [p for p in ours if not keepers & set(ancestry(p, running))]


def recorded_keepers(base: Path, sockets: dict[str, str]) -> Iterator[int]:
    for path in sockets.values():
        with suppress(OSError, ValueError, KeyError):
            yield int(json.loads(Path(path).with_name("box.json").read_bytes())["keeper"])


def ancestry(process: Process, running: dict[int, Process]) -> Iterator[int]:
    at: Process | None = process
    while at is not None:
        yield at.pid
        at = running.get(at.parent)


def links(pid: int) -> list[str]:
    """What its descriptors, its root and its directory lead to."""
    found = []
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    for name in ("cwd", "root"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/{name}"))
    return found


def belongs(pid: int, held: list[str], base: Path) -> bool:
    """By an open file, by the roots of its mounts, or by its cgroup."""
    if any(link.startswith(f"{base}/") for link in held):
        return True
    with suppress(OSError):
        if f"-{instance(base)}" in Path(f"/proc/{pid}/cgroup").read_text():
            return True
        if os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
            mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
            return any(f"/{base.name}/run/" in line.split()[3] for line in mounts)
    return False
