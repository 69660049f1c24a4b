"""One measured thing: its samples, and what they come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Measure:
    """Samples in `unit`. `missing` says why there are none; `note` what a reader should know."""

    name: str
    group: str
    unit: str = "ms"
    target: float | None = None
    bound: tuple[Measure, float] | None = None  # at most so many times another one's median
    series: str = ""  # of which this is one point, drawn at `at`
    at: float = 0.0
    samples: list[float] = field(default_factory=list)
    missing: str = ""
    note: str = ""

    def percentile(self, share: float) -> float:
        """The smallest sample that at least `share` of all samples do not exceed."""
        ordered = sorted(self.samples)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    @property
    def p50(self) -> float:
        return self.percentile(0.50)

    @property
    def p99(self) -> float:
        return self.percentile(0.99)

    def to_json(self) -> dict[str, object]:
        body: dict[str, object] = {"name": self.name, "group": self.group, "unit": self.unit}
        if self.target is not None:
            body["target"] = self.target
        if self.series:
            body |= {"series": self.series, "at": self.at}
        if self.note:
            body["note"] = self.note
        if not self.samples:
            return {**body, "missing": self.missing or "not measured"}
        return {
            **body,
            "count": len(self.samples),
            "min": round(min(self.samples), 4),
            "p50": round(self.p50, 4),
            "p95": round(self.percentile(0.95), 4),
            "p99": round(self.p99, 4),
            "max": round(max(self.samples), 4),
        }
