"""Other limits for a box that is there and has run nothing yet.

What counts memory, CPU time and processes are the box's cgroups, which the server may write as it
may make them. What programs are shown of it are files; `launch` gave the box its own, and they are
written anew where they are, as a mount shows the file and not its name. How many files one may have
open the agent sets for each program: to raise an rlimit from outside takes a capability that a
server in a container does not have. The rest was settled when the box was made: the size of its
disk and of /dev/shm, and the CPUs that programs see.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capsule.model import Limits
from capsule.providers.local.views import rewrite_memory, visible_cpus


@dataclass(frozen=True, slots=True)
class Adjuster:
    launched: Limits
    cores: int
    view: Path
    cgroups: Callable[[Limits], Sequence[Mapping[str, Any]]]  # as in a launch request

    def adjusts(self, limits: Limits) -> bool:
        was = self.launched
        counted = replace(
            was,
            memory=limits.memory,
            cpus=limits.cpus,
            processes=limits.processes,
            open_files=limits.open_files,
        )
        same_cpus = visible_cpus(limits, self.cores) == visible_cpus(was, self.cores)
        return counted == limits and same_cpus

    def apply(self, limits: Limits) -> None:
        """Blocks. Raises OSError; then it is half done."""
        _write_all(_settings(self.cgroups(limits)) - _settings(self.cgroups(self.launched)))
        if limits.memory != self.launched.memory:
            rewrite_memory(self.view, limits.memory)


def _settings(cgroups: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(f"{each['dir']}/{name}", value) for each in cgroups for name, value in each["set"]}


def _write_all(settings: Iterable[tuple[str, str]]) -> None:
    """Some must not exceed each other (memory, and memory with swap): which one goes first depends
    on whether they grow. What did not fit the first time does the second."""
    refused: list[tuple[str, str]] = []
    for path, value in settings:
        try:
            _write(path, value)
        except OSError:
            refused.append((path, value))
    for path, value in refused:
        _write(path, value)


def _write(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
