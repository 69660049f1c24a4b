"""The entries of a sandbox's log, and the cursors with which one goes through them."""

from __future__ import annotations

from capsule.edge.e2b.sandbox_logs import E2bLogEntry, Wanted, chosen
from capsule.model import ExecId, ExecInfo, Exit, Reason
from capsule.service.execs import Begun

NOW = 1_800_000_000.0


def run(n: int, at: float, duration_ms: float) -> Begun:
    exit = Exit(Reason.EXITED, 0, duration_ms=duration_ms)
    info = ExecInfo(ExecId(f"e{n}"), n, ("true",), False, False, 0.0, exit, 0, 0)
    return Begun(at, info)


RUNS = [run(n, NOW + n * 0.0123456, 7.654321) for n in range(50)] + [run(99, NOW + 5, 0.1)]


def cursor(entry: E2bLogEntry) -> int:
    return int(entry.timestamp.timestamp() * 1000 + 0.01)


def key(entry: E2bLogEntry) -> tuple[str, str]:
    return entry.fields["pid"], entry.message


def test_a_cursor_at_an_entry_finds_it_and_all_beyond_both_ways() -> None:
    forward, backward = chosen(RUNS, Wanted()), chosen(RUNS, Wanted(backward=True))
    assert len(forward) == 102 and backward == forward[::-1]
    for n, entry in enumerate(forward):
        after = chosen(RUNS, Wanted(start=cursor(entry)))
        before = chosen(RUNS, Wanted(start=cursor(entry), backward=True))
        assert {*map(key, forward[n:])} <= {*map(key, after)}
        assert {*map(key, forward[: n + 1])} <= {*map(key, before)}
        same = sum(each.timestamp == entry.timestamp for each in forward)
        assert len(after) + len(before) == len(forward) + same


def test_what_begins_and_ends_within_a_moment_ends_after_it_began() -> None:
    assert [each.message for each in chosen(RUNS, Wanted())[-2:]] == [
        "Process started",
        "Process ended",
    ]
    assert chosen(RUNS, Wanted(limit=1, backward=True))[0].message == "Process ended"
