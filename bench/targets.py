"""The targets of DESIGN §6, judged three ways: as written, at this machine's speed, and as ratios.

§6 names times and what three raw things cost on the machine that they were written for. `factor`
is how much slower the same three are in this run: the geometric mean of the three ratios, and never
less than 1. A time that holds only when it is multiplied with it is shown as missed and as held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import e2b, scaling
from bench.stats import Measure

CLONE = "kernel: clone + mounts + pivot_root"
ECHO = "HTTP echo, bare ASGI app"
PYTHON = "local `python3 -c print(1)`"
# What §6 says of its machine, in ms. Of a range its upper end, which makes the factor smaller.
STATED = {CLONE: 1.0, ECHO: 0.5, PYTHON: 10.0}

FLAT = 1.5  # times: what "the per-operation cost stays flat" is taken to mean, on a noisy machine
MB_300 = 300e6 / 2**20  # 300 MB/s, in MiB
MISSED = "MISSED"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Against another measure of the run: it takes `at_least`, we `at_most`, so many times."""

    rival: str
    group: str
    name: str
    at_least: float = 0.0
    at_most: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    group: str
    name: str
    limit: float
    ratios: tuple[Ratio, ...] = ()
    least: bool = False  # a number to reach, not one to stay below
    timed: bool = True  # grows with a slower machine


def docker(what: str, name: str, times: float) -> Ratio:
    return Ratio("Docker", f"{what} on runc", f"Docker API: {name}", at_least=times)


TARGETS = (
    Target(
        "create, no pool",
        "create",
        "Capsule SDK: create",
        8.0,
        (docker("create", "create + start", 20),),
    ),
    Target(
        "create, warm pool",
        "warm",
        "Capsule SDK: create, warm",
        2.5,
        (docker("create", "create + start", 60),),
    ),
    Target(
        "exec `true`",
        "exec",
        "Capsule SDK: exec `true`",
        2.5,
        (
            docker("exec", "exec `true`", 15),
            Ratio("a local subprocess", "exec", "local subprocess `true`", at_most=3),
        ),
    ),
    Target(
        "run Python in a context",
        "context",
        "Capsule SDK: run `1 + 1` in a context",
        2.5,
        (Ratio("starting python3", "run", PYTHON, at_least=4),),
    ),
    Target("delete", "delete", "Capsule SDK: delete", 3.0, (docker("delete", "remove", 14),)),
    Target("E2B's SDK: Sandbox.create()", e2b.GROUP, e2b.CREATE, 10.0),
    Target("E2B's SDK: commands.run(`true`)", e2b.GROUP, e2b.RUN, 8.0),
    Target("E2B's SDK: run_code(`1+1`)", e2b.GROUP, e2b.CODE, 6.0),
    Target("E2B's SDK: files.write, 1 KiB", e2b.GROUP, e2b.WRITE, 4.0),
    Target("E2B's SDK: files.read, 1 KiB", e2b.GROUP, e2b.READ, 4.0),
    *(
        Target(f"E2B's SDK: {what}, MiB/s", e2b.TRANSFER, name, MB_300, least=True, timed=False)
        for what, name in (("100 MiB up", e2b.UP), ("100 MiB down", e2b.DOWN))
    ),
    *(
        Target(f"growth of {what}", "scale", f"Capsule: growth of {what}", FLAT, timed=False)
        for what in scaling.OPERATIONS
    ),
    Target("100 at once, p99", "scale", "Capsule: 100 at once, p99", 500.0),
    Target("idle sandbox, KiB", "scale", "Capsule: memory of an idle sandbox", 1024.0, timed=False),
    Target(
        "sandboxes alive together",
        "scale",
        "Capsule: sandboxes alive together",
        1000.0,
        least=True,
        timed=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Judged:
    what: str
    measured: str
    written: str
    here: str
    beside: str

    @property
    def holds(self) -> bool:
        """At this machine's speed, and beside the others."""
        return MISSED not in self.here + self.beside and self.measured != NOT_MEASURED


def found(measures: Sequence[Measure], group: str, name: str) -> Measure | None:
    fitting = (m for m in measures if m.group == group and m.name == name and m.samples)
    return next(fitting, None)


def references(measures: Sequence[Measure]) -> Iterator[tuple[str, float, float]]:
    """Each raw thing that was measured, with its median and what §6 says of it."""
    for measure in measures:
        if measure.name in STATED and measure.samples:
            yield measure.name, measure.p50, STATED[measure.name]


def factor(measures: Sequence[Measure]) -> float:
    shares = [p50 / stated for _, p50, stated in references(measures)]
    if not shares:
        return 1.0
    return max(1.0, math.exp(sum(map(math.log, shares)) / len(shares)))


def judge(measures: Sequence[Measure]) -> list[Judged]:
    slower = factor(measures)
    return [judged(target, measures, slower) for target in TARGETS]


def judged(target: Target, measures: Sequence[Measure], slower: float) -> Judged:
    measure = found(measures, target.group, target.name)
    if measure is None:
        return Judged(target.what, NOT_MEASURED, "", "", "")
    value = measure.p50
    if target.least and measure.target == value < target.limit:
        return Judged(target.what, number(value), (untried := "more not tried"), untried, "")
    written = met(value, target.limit, target.least)
    here = met(value, target.limit * slower, target.least) if target.timed else written
    ratios = [beside(ratio, value, measures) for ratio in target.ratios]
    return Judged(target.what, number(value), written, here, "; ".join(ratios))


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def met(value: float, limit: float, least: bool) -> str:
    good = value >= limit if least else value <= limit
    return f"{'met' if good else MISSED} ({'≥' if least else '≤'} {number(limit)})"


def beside(ratio: Ratio, value: float, measures: Sequence[Measure]) -> str:
    rival = found(measures, ratio.group, ratio.name)
    if rival is None:
        return f"{ratio.rival}: not here"
    if ratio.at_least:
        times = rival.p50 / value
        verdict = f"{'met' if times >= ratio.at_least else MISSED} (≥ {ratio.at_least:g}×)"
        return f"{ratio.rival} {times:.3g}× as long: {verdict}"
    times = value / rival.p50
    verdict = f"{'met' if times <= ratio.at_most else MISSED} (≤ {ratio.at_most:g}×)"
    return f"{times:.2g}× {ratio.rival}: {verdict}"


def explanation(measures: Sequence[Measure]) -> str:
    parts = [f"{name} {p50:.2f} ms (§6: {stated:g})" for name, p50, stated in references(measures)]
    return (
        f"This machine takes {factor(measures):.2f} times as long as the one that DESIGN §6 was"
        f" written for, by the geometric\nmean of {', '.join(parts)}.\n"
        "`as written` is the target of §6; `at this speed` the same times that factor (only times"
        " grow, never below ×1)."
    )
