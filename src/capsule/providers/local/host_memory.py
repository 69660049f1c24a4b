"""How much memory there is for all boxes together: the machine's, or what our own cgroups allow."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

from capsule.providers.local import cgroups


@functools.cache
def within_reach() -> int:
    """Blocks."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        return machine
    return least(cgroups.find_here(), own, machine)


def least(layout: cgroups.Layout, own_cgroups: str, machine: int) -> int:
    """The lowest limit on the way from our own cgroup to the root that we see. A container may be
    told the host's name of its cgroup, and see it as the root."""
    if layout.version == 1 and "memory" in layout.points:
        point, name, key = layout.points["memory"], "memory.limit_in_bytes", "memory"
    elif layout.version == 2 and layout.unified is not None:
        point, name, key = layout.unified, "memory.max", ""
    else:
        return machine
    paths = [line.split(":", 2) for line in own_cgroups.splitlines()]
    own = next((path for _, names, path in paths if key in names.split(",")), "/")
    here = point / own.lstrip("/")
    limits = _limits(each / name for each in (here, *here.parents) if each.is_relative_to(point))
    return min((machine, *limits))


def _limits(files: Iterable[Path]) -> Iterable[int]:
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) > 0:
            yield int(text)
