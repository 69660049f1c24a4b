"""Which cores a box's programs run on: those with the fewest boxes so far."""

from __future__ import annotations

from collections.abc import Iterable


class Cores:
    def __init__(self, cpus: Iterable[int]) -> None:
        self._load = dict.fromkeys(cpus, 0)

    def __len__(self) -> int:
        return len(self._load)

    def pick(self, count: int) -> tuple[int, ...]:
        """Empty when the box may have all of them: then there is nothing to choose."""
        if count >= len(self._load):
            return ()
        return tuple(sorted(sorted(self._load, key=lambda cpu: (self._load[cpu], cpu))[:count]))

    def take(self, cpus: Iterable[int]) -> None:
        for cpu in cpus:
            if cpu in self._load:
                self._load[cpu] += 1

    def release(self, cpus: Iterable[int]) -> None:
        for cpu in cpus:
            if self._load.get(cpu, 0) > 0:
                self._load[cpu] -= 1
