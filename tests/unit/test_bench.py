"""The benchmark hides no missed target, and takes the speed of the machine into account."""

from __future__ import annotations

import os
import signal
import subprocess

from bench import endure, page, report, targets
from bench.scaling import IN_ANY, OPERATIONS, growth
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


def test_what_was_not_measured_does_not_hold() -> None:
    found = judged([Measure(*CREATE, missing="why")])
    assert found.measured == targets.NOT_MEASURED
    assert not found.holds


def test_fewer_sandboxes_than_the_target_are_met_only_when_they_were_tried() -> None:
    def alive(tried: float, came: float) -> str:
        name = "Capsule: sandboxes alive together"
        measure = Measure(name, "scale", unit="count", target=tried, samples=[came])
        return next(j.written for j in targets.judge([measure]) if j.what.endswith("together"))

    assert alive(200, 200) == "more not tried"
    assert alive(200, 150) == "MISSED (≥ 1,000)"
    assert alive(1000, 1000) == "met (≥ 1,000)"


def test_only_processes_of_this_server_are_its_boxes() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        sleeper = int(one.stdout.readline())
        try:
            assert list(endure.agents(one.pid)) == [sleeper]
            assert {one.pid, sleeper} <= set(endure.agents(os.getpid()))
            assert list(endure.agents(sleeper)) == []
        finally:
            os.kill(sleeper, signal.SIGKILL)


def test_growth_beyond_its_bound_is_named() -> None:
    things = [
        endure.Watched("fds", lambda: 0, bound=2),
        endure.Watched("memory", lambda: 0, each=1.0),
        endure.Watched("of the machine", lambda: 0, judged=False),
    ]
    rows: list[list[float]] = [[0.0] * 5, [10, 1, 5, 50, 0], [20, 2, 8, 60, 900]]
    assert endure.failures(things, rows) == ["fds by 3, 2 allowed for 10 sandboxes"]


def test_growth_is_what_many_take_against_few() -> None:
    def took(what: str, alive: int, ms: float) -> Measure:
        name = f"Capsule: {what}, {alive:,} alive"
        return Measure(name, "growth", series=what, at=alive, samples=[ms])

    what = (*OPERATIONS, IN_ANY)
    crowd = [took(each, alive, ms) for each in what for alive, ms in ((1, 4.0), (1000, 6.2))]
    grown = growth(crowd, 1, 1000)
    assert [round(each.p50, 2) for each in grown] == [1.55] * 4
    judged = [j for j in targets.judge(grown) if j.what.startswith("growth of")]
    assert [(j.written, j.holds) for j in judged] == [("MISSED (≤ 1.5)", False)] * 3
