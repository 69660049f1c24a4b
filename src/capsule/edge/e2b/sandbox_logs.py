"""A sandbox's log as E2B's control plane has it: which programs began and ended in it, as far as
its agent remembers them. What they print is for who started them. The agent tells how long ago it
was: moments are good to some milliseconds, and the same whenever somebody asks, until the server
starts again. They are whole milliseconds, as cursors are: who goes on from one skips nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from capsule.edge.e2b.control_views import View
from capsule.edge.errors import encode
from capsule.model import ExecInfo, Exit
from capsule.service.execs import Begun

LEVELS = ("debug", "info", "warn", "error")
LONGEST = 1000  # characters of a command
PAGE, MOST = 1000, 1000
Level = Literal["debug", "info", "warn", "error"]


class E2bLogEntry(View, frozen=True, kw_only=True):
    timestamp: datetime
    level: str
    message: str
    fields: dict[str, str]


class E2bLogLine(View, frozen=True, kw_only=True):
    timestamp: datetime
    line: str


class E2bLogs(View, frozen=True, kw_only=True):
    logs: list[E2bLogEntry]


class E2bOlderLogs(View, frozen=True, kw_only=True):
    logs: list[E2bLogLine]
    log_entries: list[E2bLogEntry]


class Wanted(NamedTuple):
    start: int = 0  # milliseconds since 1970; forward: from it on, backward: until it
    limit: int = PAGE
    backward: bool = False
    level: Level = "debug"  # and above
    search: str = ""


def chosen(execs: Sequence[Begun], wanted: Wanted) -> list[E2bLogEntry]:
    """In the order that is asked for: backward is forward turned round. Within a millisecond the
    entries of the earlier program come first."""
    earlier_first = sorted(execs, key=lambda each: each.at)
    entries = [entry for began, info in earlier_first for entry in _told(info, began)]
    entries.sort(key=lambda entry: entry.timestamp)
    if wanted.backward:
        entries.reverse()
    found = [entry for entry in entries if _is_wanted(entry, wanted)]
    return found[: wanted.limit]


def older(entries: Sequence[E2bLogEntry]) -> E2bOlderLogs:
    """As the first version has it: lines, which are JSON."""
    lines = [
        E2bLogLine(timestamp=each.timestamp, line=encode(_flat(each)).decode()) for each in entries
    ]
    return E2bOlderLogs(logs=lines, log_entries=list(entries))


def _told(info: ExecInfo, began: float) -> Iterator[E2bLogEntry]:
    about = {"logger": "process", "pid": str(info.pid), "cmd": " ".join(info.argv)[:LONGEST]}
    yield _entry(began, "info", "Process started", about)
    if info.exit is not None:
        ended = began + info.exit.duration_ms / 1000
        level = "info" if info.exit.exit_code == 0 and not info.exit.signal else "error"
        yield _entry(ended, level, "Process ended", {**about, **_end(info.exit)})


def _end(exit: Exit) -> dict[str, str]:
    found = {"exit_code": str(exit.exit_code), "reason": str(exit.reason)}
    return {**found, "signal": str(exit.signal)} if exit.signal else found


def _entry(at: float, level: str, message: str, fields: dict[str, str]) -> E2bLogEntry:
    when = datetime.fromtimestamp(round(at, 3), UTC)
    return E2bLogEntry(timestamp=when, level=level, message=message, fields=fields)


def _is_wanted(entry: E2bLogEntry, wanted: Wanted) -> bool:
    at = round(entry.timestamp.timestamp() * 1000)
    if wanted.start and (at > wanted.start if wanted.backward else at < wanted.start):
        return False
    if LEVELS.index(entry.level) < LEVELS.index(wanted.level):
        return False
    return wanted.search in f"{entry.message} {entry.fields['cmd']}"


def _flat(entry: E2bLogEntry) -> dict[str, str]:
    return {"level": entry.level, "message": entry.message, **entry.fields}
