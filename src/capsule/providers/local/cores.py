"""Which cores a box's programs run on: those with the fewest boxes so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Cores:
    def __init__(self, cpus: Iterable[int]) -> None:
        self._load = dict.fromkeys(cpus, 0)
        self._held: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._load)

    def pick(self, count: int) -> tuple[int, ...]:
        """Empty when the box may have all of them: then there is nothing to choose."""
        if count >= len(self._load):
            return ()
        return tuple(sorted(sorted(self._load, key=lambda cpu: (self._load[cpu], cpu))[:count]))

    def take(self, box: str, cpus: Sequence[int]) -> None:
        """Once for each box, however often it is adopted."""
        self.release(box)
        self._held[box] = [cpu for cpu in cpus if cpu in self._load]
        for cpu in self._held[box]:
            self._load[cpu] += 1

    def release(self, box: str) -> None:
        for cpu in self._held.pop(box, ()):
            self._load[cpu] -= 1
