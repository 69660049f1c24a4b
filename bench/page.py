"""Puts a run's tables and plots into docs/performance.md, between its two marks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import report, targets
from bench.stats import Measure
from tests.support import ROOT

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- numbers: make bench -->", "<!-- /numbers -->"
PLOTS = {
    "distributions": "Which share of the samples took at most so long, per operation",
    "scaling": "Cost against live sandboxes, rates against clients and time",
}


def write(measures: Sequence[Measure], load: float, results: Path) -> None:
    for name in PLOTS:
        shutil.copyfile(results / f"{name}.svg", ROOT / "docs" / "assets" / f"bench-{name}.svg")
    old = PAGE.read_text("utf-8")
    head, _, rest = old.partition(BEGIN)
    tail = rest.partition(END)[2]
    body = numbers(measures, load)
    PAGE.write_text(f"{head}{BEGIN}\n{body}\n{END}{tail}", encoding="utf-8")


def numbers(measures: Sequence[Measure], load: float) -> str:
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    end = os.getloadavg()[0]
    parts = [f"{day}: {report.conditions(load)}; at the end {end:.1f}.", verdicts(measures)]
    parts.append(targets.explanation(measures).replace("\n", " "))
    parts += [f"![{what}](assets/bench-{name}.svg)" for name, what in PLOTS.items()]
    parts.append(f"```\n{report.table(measures)}\n```")
    return "\n\n".join(parts)


def verdicts(measures: Sequence[Measure]) -> str:
    rows = ["| target | measured | as written | at this speed | beside |", "|---|---|---|---|---|"]
    rows += [
        f"| {j.what} | {j.measured} | {j.written} | {j.here} | {j.beside} |"
        for j in targets.judge(measures)
    ]
    return "\n".join(rows)
