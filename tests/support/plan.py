"""What the first phase of `make test` found: how many tests of each phase there are, and where.

Each phase would otherwise collect all tests anew, which takes seconds.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import pytest

from tests.support import ROOT

PLAN = "CAPSULE_TEST_PLAN"


@dataclass
class Plan:
    counts: dict[str, int]  # phase → tests
    files: dict[str, list[str]]  # phase → where they are
    left_out: dict[str, int]  # component, or "slow" → tests

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        path = folder / "plan"
        return cls(**json.loads(path.read_text())) if path.exists() else None


def write(items: list[pytest.Item], left_out: dict[str, int], *, slow: bool) -> None:
    """Once in a run. `slow`: whether those tests run, too."""
    folder = os.environ.get(PLAN)
    if not folder or os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        return
    path = Path(folder, "plan")
    if path.exists():
        return
    left_out = {**left_out, "slow": sum(map(_is_slow, items))}
    chosen = [item for item in items if slow or not _is_slow(item)]
    files: dict[str, set[str]] = {}
    for item in chosen:
        files.setdefault(_phase(item), set()).add(str(item.path.relative_to(ROOT)))
    plan = Plan(
        counts=dict(Counter(map(_phase, chosen))),
        files={phase: sorted(found) for phase, found in files.items()},
        left_out=left_out,
    )
    path.write_text(json.dumps(asdict(plan)))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _phase(item: pytest.Item) -> str:
    if item.get_closest_marker("serial"):
        return "serial"
    return "engine" if item.get_closest_marker("engine") else "parallel"
