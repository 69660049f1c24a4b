"""The benchmark hides no missed target, and takes the speed of the machine into account."""

from __future__ import annotations

from bench import page, report, targets
from bench.stats import Measure

CREATE = ("Capsule SDK: create", "create")


def measures(create: float, *, slower: float = 1.0, docker: float = 1000.0) -> list[Measure]:
    raw = [
        Measure(name, "raw", samples=[stated * slower]) for name, stated in targets.STATED.items()
    ]
    bare = Measure("Docker API: create + start", "create on runc", samples=[docker])
    return [*raw, bare, Measure(*CREATE, samples=[create])]


def judged(all_of: list[Measure]) -> targets.Judged:
    return next(j for j in targets.judge(all_of) if j.what == "create, no pool")


def test_a_time_that_is_met_only_at_this_machines_speed_is_shown_as_missed() -> None:
    some = measures(12.0, slower=2.0)
    found = judged(some)
    assert (found.written, found.here, found.holds) == ("MISSED (≤ 8)", "met (≤ 16)", True)
    for table in (report.verdicts(some), page.numbers(some, 0.0)):
        assert "MISSED (≤ 8)" in table


def test_a_missed_ratio_is_a_miss() -> None:
    found = judged(measures(1.0, docker=10.0))
    assert "MISSED (≥ 20×)" in found.beside
    assert not found.holds
