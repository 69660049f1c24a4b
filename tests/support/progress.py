"""How a phase of `make test` looks while it runs: a pytest plugin of the process that leads it.

It takes the place of pytest's dots: one line with counts and an estimate, failures when they
happen. At the end it writes the results, from which tests/run.py makes the last screen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

FOLDER = "CAPSULE_TEST_RUN"
PHASE = "CAPSULE_TEST_PHASE"
EVERY = 0.5 if sys.stdout.isatty() else 15.0  # seconds between two lines
LONGEST = 60  # lines of a failure that are shown


@dataclass
class Results:
    passed: int = 0
    expected: int = 0  # failures that a test announces
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def read(folder: Path, phase: str) -> Results:
    """What a phase wrote; nothing where it never came to its end."""
    path = folder / f"{phase}.results"
    return Results(**json.loads(path.read_text())) if path.exists() else Results()


class Progress:
    def __init__(self, folder: Path, phase: str) -> None:
        self._folder = folder
        self._phase = phase
        self._results = Results()
        self._total = 0
        self._ended: set[str] = set()
        self._expected: set[str] = set()
        self._began = self._shown = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._start(len(session.items))

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._start(len(ids))

    def _start(self, total: int) -> None:
        if total and not self._total:
            self._total = total
            self._began = time.monotonic()
            self._line()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report.nodeid, report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        results, name = self._results, report.nodeid
        results.seconds[name] = results.seconds.get(name, 0.0) + report.duration
        if report.failed:
            self._fail(name, report)
        elif report.skipped and hasattr(report, "wasxfail"):
            results.expected += 1
            self._expected.add(name)
        elif report.skipped:
            assert isinstance(report.longrepr, tuple)
            results.skipped[name] = str(report.longrepr[2]).removeprefix("Skipped: ")
        if report.when == "teardown":
            over = results.failed.keys() | results.skipped.keys() | self._expected
            results.passed += name not in over
            self._ended.add(name)
            if time.monotonic() - self._shown > EVERY:
                self._line()

    def _fail(self, name: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        if name in self._results.failed:
            return
        text = report.longreprtext
        self._results.failed[name] = _reason(text)
        shown = text.splitlines()[-LONGEST:]
        for title, content in report.sections:
            shown += [f"-- {title}", *content.splitlines()[-LONGEST // 3 :]]
        self._say(f"FAILED {name}")
        self._say("\n".join(f"    {line}" for line in shown) + "\n")

    def _line(self) -> None:
        self._shown = time.monotonic()
        done, failed = len(self._ended), len(self._results.failed)
        line = f"  {done:,} of {self._total:,}"
        line += f", {failed} failed" if failed else ""
        if done > 20:
            left = (self._shown - self._began) / done * (self._total - done)
            line += f", about {minutes(left)} left"
        if sys.stdout.isatty():
            sys.stdout.write(f"\r\033[K{line}")
            sys.stdout.flush()
        else:
            self._say(line)

    def _say(self, text: str) -> None:
        lead = "\r\033[K" if sys.stdout.isatty() else ""
        sys.stdout.write(f"{lead}{text}\n")
        sys.stdout.flush()

    def pytest_sessionfinish(self) -> None:
        if sys.stdout.isatty():
            sys.stdout.write("\r\033[K")
        (self._folder / f"{self._phase}.results").write_text(json.dumps(asdict(self._results)))


def minutes(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def _reason(text: str) -> str:
    """The line of a failure that says most."""
    lines = [line for line in text.splitlines() if line.startswith("E ")]
    return (lines or text.splitlines() or ["no reason given"])[0].removeprefix("E").strip()[:200]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or FOLDER not in os.environ:
        return
    folder, phase = Path(os.environ[FOLDER]), os.environ[PHASE]
    config.pluginmanager.register(Progress(folder, phase), "capsule-progress")
    # Pytest's own report goes to a file: it is shown if the phase itself breaks.
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    reporter._tw._file = (folder / f"{phase}.log").open("w")
