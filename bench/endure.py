"""`make endure`: creates, runs and deletes sandboxes one after another, and looks for what grows.

Looked at before, ten times on the way, and at the end: the server's memory, descriptors and
threads, those of its launcher, and what it has on the machine (processes, mounts, cgroups, loop
devices, disk). Only what belongs to this server counts, so others may work on the machine
meanwhile. Growth is counted from the first tenth on: caches, free lists and the store's log have
their size by then. It fails when anything grew by more than its bound.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench import report
from bench.server import Serving, serving
from capsule_sdk import CapsuleClient

LOOKS = 10
SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Watched:
    """Something that must not grow by more than `bound`, plus `each` per sandbox."""

    name: str
    read: Callable[[], float]
    bound: float = 0.0
    each: float = 0.0
    judged: bool = True

    def allowed(self, sandboxes: int) -> float:
        return self.bound + self.each * sandboxes


def main() -> None:
    options = arguments()
    load = os.getloadavg()[0]
    with serving(64) as server, CapsuleClient(server.url) as client:
        suffix = cgroup_suffix(client)
        things = watched(server, suffix)
        rows = endure(client, things, options.count)
    print(table(things, rows))
    print(f"\n{report.conditions(load)}")
    grown = failures(things, rows)
    if grown:
        sys.exit("grown: " + "; ".join(grown))
    print(f"{options.count:,} sandboxes, and nothing grew beyond its bound")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="look for what grows with every sandbox")
    parser.add_argument("--count", type=int, default=1000, help="sandboxes one after another")
    return parser.parse_args()


def cgroup_suffix(client: CapsuleClient) -> str:
    """What this server's cgroups end with: `<box>-<server>`. Empty where there are none."""
    with client.create("bash") as sandbox:
        names = (path.name for path in cgroups(""))
        mine = next((name for name in names if name.startswith(sandbox.id)), "")
    return mine.removeprefix(sandbox.id)


def cgroups(suffix: str) -> Iterator[Path]:
    for pattern in ("capsule/*", "*/capsule/*"):
        for path in Path("/sys/fs/cgroup").glob(pattern):
            if path.is_dir() and path.name.endswith(suffix):
                yield path


def watched(server: Serving, suffix: str) -> list[Watched]:
    pid = server.pid
    launcher = next(iter(children(pid)), 0)
    return [
        # Python's and SQLite's free lists move by some hundred KiB either way.
        Watched("server KiB", lambda: memory_kib(pid), bound=4096, each=0.5),
        Watched("server fds", lambda: entries(pid, "fd"), bound=2),
        Watched("threads", lambda: entries(pid, "task"), bound=1),
        Watched("launcher KiB", lambda: memory_kib(launcher), bound=256),
        Watched("its fds", lambda: entries(launcher, "fd")),
        Watched("agents", lambda: len(list(agents(pid)))),
        Watched("mounts", lambda: mounts(pid, server.base, server.run)),
        Watched("cgroups", lambda: len(list(cgroups(suffix))) if suffix else 0),
        Watched("loops", lambda: loops(server.base)),
        Watched("disk KiB", lambda: disk_kib(server.base, server.run), bound=4096, each=0.5),
        # Cut off each time it has 4 MiB, or a little later on a busy machine.
        Watched("log KiB", lambda: disk_kib(server.base, log=True), bound=16384),
        Watched("memcgs*", memory_cgroups, judged=False),
        Watched("slab MiB*", slab_mib, judged=False),
    ]


def endure(client: CapsuleClient, things: list[Watched], count: int) -> list[list[float]]:
    """One row per look: how many sandboxes there were by then, seconds, and each thing."""
    for _ in range(3):  # the first few leave something for those that follow, such as a disk
        client.create("bash").delete()
    time.sleep(0.5)
    started = time.monotonic()
    rows = [[0.0, 0.0, *(thing.read() for thing in things)]]
    step = max(1, count // LOOKS)
    for number in range(1, count + 1):
        sandbox = client.create("bash")
        sandbox.exec(["true"]).check()
        sandbox.delete()
        if number % step == 0:
            rows.append([number, time.monotonic() - started, *settled(things, rows[0][2:])])
            tell(rows[-1], count)
    return rows


def settled(things: list[Watched], before: list[float]) -> list[float]:
    """What belongs to a box may go a moment after its delete was answered: waits for that."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = [thing.read() for thing in things]
        exact = (
            value <= first
            for thing, value, first in zip(things, now, before, strict=True)
            if thing.judged and thing.bound == 0
        )
        if all(exact) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def tell(row: list[float], count: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{row[0]:.0f} of {count}", end="", file=sys.stderr, flush=True)


def failures(things: list[Watched], rows: list[list[float]]) -> list[str]:
    base, last = rows[1], rows[-1]
    sandboxes = int(last[0] - base[0])
    found = []
    for thing, first, end in zip(things, base[2:], last[2:], strict=True):
        if thing.judged and end - first > thing.allowed(sandboxes):
            allowed = f"{thing.allowed(sandboxes):g} allowed for {sandboxes:,} sandboxes"
            found.append(f"{thing.name} by {end - first:g}, {allowed}")
    return found


def table(things: list[Watched], rows: list[list[float]]) -> str:
    names = ["sandboxes", "seconds", *(thing.name for thing in things)]
    base, last = rows[1], rows[-1]
    sandboxes = int(last[0] - base[0])
    lines = [names, *([f"{value:.0f}" for value in row] for row in rows)]
    lines.append(
        ["growth", "", *(f"{b - a:+.0f}" for a, b in zip(base[2:], last[2:], strict=True))]
    )
    bounds = (f"≤ {thing.allowed(sandboxes):.0f}" if thing.judged else "–" for thing in things)
    lines.append(["allowed", "", *bounds])
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    shown = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    shown.append(
        "* of the whole machine, whoever made them: memory cgroups with those that the kernel has\n"
        "  yet to free, and its own memory. Not judged."
    )
    return "\n".join(shown)


def children(pid: int) -> list[int]:
    told = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for text in told for child in text.split()]


def memory_kib(pid: int) -> float:
    """What is its own: private pages. Shared ones change with who else maps them."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1])
    return total


def entries(pid: int, what: str) -> int:
    return len(os.listdir(f"/proc/{pid}/{what}"))


def agents(pid: int) -> Iterator[int]:
    """Processes of the server's boxes: keepers, pid 1s, forkers. The launcher is one, always."""
    with suppress(OSError):  # it ends while we look
        for child in children(pid):
            yield child
            yield from agents(child)


def mounts(pid: int, *folders: Path) -> int:
    found = Path(f"/proc/{pid}/mountinfo").read_text()
    return sum(found.count(str(folder)) for folder in folders)


def loops(base: Path) -> int:
    count = 0
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            count += path.read_text().startswith(str(base))
    return count


def disk_kib(*folders: Path, log: bool = False) -> float:
    """Blocks in use below them: of the databases' logs, which come and go, or of all others."""
    total = 0
    for at, _, names in itertools.chain.from_iterable(map(os.walk, folders)):
        for name in names:
            with suppress(OSError):
                if name.endswith("-wal") is log:
                    total += (Path(at) / name).lstat().st_blocks // 2
    return total


def memory_cgroups() -> int:
    for line in Path("/proc/cgroups").read_text().splitlines():
        if line.startswith("memory"):
            return int(line.split()[2])
    return 0


def slab_mib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Slab:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
