"""What is counted since the server started, for whoever reads `/metrics`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from capsule.model import Reason
from capsule.service.happenings import Happening, Happenings, Kind

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)


class Spread:
    """How long things took: how many at most so long, and all of them together."""

    __slots__ = ("_counts", "seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def up_to(self) -> Iterator[tuple[str, float]]:
        """As Prometheus wants it: each bound with all that are below it."""
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield bound, float(total)


class Tally:
    def __init__(self, happenings: Happenings) -> None:
        self.sandboxes: Counter[Kind] = Counter()
        self.execs: Counter[Reason] = Counter()
        self.exec_seconds = Spread()
        happenings.listeners.append(self._count)

    def _count(self, happening: Happening) -> None:
        if happening.exec is None:
            self.sandboxes[happening.kind] += 1
        else:
            self.execs[happening.exec.exit.reason] += 1
            self.exec_seconds.add(happening.exec.exit.duration_ms / 1000)
