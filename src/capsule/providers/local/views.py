"""What a box is shown of the machine: its own CPUs and memory, not the host's.

Programs size themselves by these files: glibc's sysconf (Python's os.cpu_count) reads
/sys/devices/system/cpu/online, libuv (Node) /proc/stat and /proc/cpuinfo and the cgroup's memory
limit, `free` /proc/meminfo. `nproc` asks for the affinity, which the agent sets. What is shown is
fixed at launch: usage over time is in the API's metrics. sysinfo(2) still tells the host's memory.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path

from capsule.model import MIB, Limits
from capsule.providers.local.folders import make_folder
from capsule.providers.local.skeleton import Tree, prepare, write_tree

FILES = ("cpuinfo", "stat", "meminfo")  # bound over the ones in /proc


def visible_cpus(limits: Limits, available: int) -> int:
    return max(1, min(math.ceil(limits.cpus), available))


class Views:
    """One directory per (cpus, memory), shared by the boxes that have them; and one for each box
    that may be given other limits later."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._known: dict[tuple[int, int], Path] = {}

    def clear(self) -> None:
        """Only when no box is running: the running ones look at these files."""
        self._known.clear()
        shutil.rmtree(self._parent, ignore_errors=True)

    def known(self, cpus: int, memory: int) -> Path | None:
        found = self._known.get(_key(cpus, memory))
        if found is not None and not os.path.lexists(found):  # somebody tidied up /run
            return None
        return found

    def make(self, cpus: int, memory: int) -> Path:
        key = _key(cpus, memory)
        tree = view_tree(cpus, key[1] * MIB)
        self._known[key] = made = prepare(tree, self._parent, f"{cpus}-{key[1]}")
        return made

    def own(self, box: str) -> Path:
        """Where the view of a box is that shares it with nobody."""
        return self._parent / f"own-{box}"

    def make_own(self, box: str, cpus: int, memory: int) -> None:
        """Blocks."""
        make_folder(self._parent, 0o755)
        write_tree(view_tree(cpus, _key(cpus, memory)[1] * MIB), self.own(box))

    def drop_own(self, box: str) -> None:
        """Blocks. What never was is fine."""
        shutil.rmtree(self.own(box), ignore_errors=True)

    def drop_lost(self, boxes: Path) -> None:
        """Those that a killed server left of boxes that are gone. Blocks."""
        for path in self._parent.glob("own-*"):
            box = path.name.removeprefix("own-")
            if not (boxes / box).exists():
                self.drop_own(box)


def _key(cpus: int, memory: int) -> tuple[int, int]:
    """Whole MiB: the number of views stays small whatever clients ask for."""
    return cpus, max(1, memory // MIB)


def view_tree(cpus: int, memory: int, proc: Path = Path("/proc")) -> Tree:
    tree = Tree()
    tree.file("cpuinfo", cpuinfo((proc / "cpuinfo").read_text(errors="replace"), cpus), 0o444)
    tree.file("stat", cpu_stat((proc / "stat").read_text(), cpus), 0o444)
    tree.file("meminfo", meminfo(memory), 0o444)
    online = "0\n" if cpus == 1 else f"0-{cpus - 1}\n"
    for name in ("online", "possible", "present"):
        tree.file(f"sys/devices/system/cpu/{name}", online, 0o444)
    for number in range(cpus):
        tree.dir(f"sys/devices/system/cpu/cpu{number}")
    tree.dir("empty")  # shown instead of folders that are no business of a box
    # Where libuv, Go and .NET look for the limit: at the root of the (private) cgroup namespace.
    for name in ("memory.max", "memory.high"):
        tree.file(f"sys/fs/cgroup/{name}", f"{memory}\n", 0o444)
    for name in ("memory.limit_in_bytes", "memory.soft_limit_in_bytes"):
        tree.file(f"sys/fs/cgroup/memory/{name}", f"{memory}\n", 0o444)
    return tree


def rewrite_memory(view: Path, memory: int) -> None:
    """Where the files are: they are mounted. Blocks."""
    memory = _key(1, memory)[1] * MIB
    for path, node in view_tree(1, memory).nodes.items():
        if node.kind == "file" and (path == "meminfo" or path.startswith("sys/fs/cgroup/")):
            fd = os.open(view / path, os.O_WRONLY | os.O_TRUNC)
            try:
                os.write(fd, node.data)
            finally:
                os.close(fd)


def cpuinfo(host: str, cpus: int) -> str:
    """The first CPUs of the host's list, counted anew."""
    blocks = [b for b in host.strip().split("\n\n") if b.startswith("processor")]
    shown = []
    for number in range(cpus):
        block = blocks[number % len(blocks)] if blocks else "processor\t: 0"
        block = re.sub(r"^(processor\s*:).*$", rf"\1 {number}", block, count=1, flags=re.M)
        block = re.sub(r"^((?:siblings|cpu cores)\s*:).*$", rf"\1 {cpus}", block, flags=re.M)
        shown.append(
            re.sub(r"^((?:core id|(?:initial )?apicid)\s*:).*$", rf"\1 {number}", block, flags=re.M)
        )
    return "\n\n".join(shown) + "\n\n"


def cpu_stat(host: str, cpus: int) -> str:
    """Idle CPUs; only the time of boot is the host's (`ps` computes start times from it)."""
    boot = re.search(r"^btime \d+$", host, flags=re.M)
    names = ["cpu ", *(f"cpu{n}" for n in range(cpus))]
    lines = [f"{name} 0 0 0 {100 if n else 100 * cpus} 0 0 0 0 0 0" for n, name in enumerate(names)]
    lines += ["intr 0", "ctxt 0", boot.group(0) if boot else "btime 0", "processes 1"]
    return "\n".join([*lines, "procs_running 1", "procs_blocked 0", "softirq 0"]) + "\n"


def meminfo(memory: int) -> str:
    kib = memory // 1024
    rows = {"MemTotal": kib, "MemFree": kib, "MemAvailable": kib}
    rows |= dict.fromkeys(
        (
            "Buffers",
            "Cached",
            "SwapCached",
            "Active",
            "Inactive",
            "SwapTotal",
            "SwapFree",
            "Dirty",
            "Writeback",
            "AnonPages",
            "Mapped",
            "Shmem",
            "Slab",
            "SReclaimable",
            "SUnreclaim",
        ),
        0,
    )
    return "".join(f"{name + ':':<16}{value:>8} kB\n" for name, value in rows.items())
