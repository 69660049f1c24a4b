"""`make test`: what the machine has, the tests in phases, and one screen at the end.

Without CI=true it leaves out what takes longest and what the machine lacks, and installs nothing.
With CI=true it installs what is missing, as root, and a missing component is a failure.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.support import IN_CI, ROOT, components, supervisor
from tests.support.plan import PLAN, Plan
from tests.support.progress import FOLDER, PHASE, Results, minutes, read

PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.support.progress"]
MOST_RETRIED = 25  # more failures than this are no accident
SLOWEST = 10
NONE_COLLECTED = 5


class Phase(NamedTuple):
    name: str
    title: str
    marks: str
    parallel: bool


PHASES = (
    Phase("parallel", "on this host", "not engine and not serial", True),
    Phase("engine", "in containers of a Docker Engine", "engine and not serial", True),
    Phase("serial", "alone on the machine", "serial", False),
)


class Terminated(KeyboardInterrupt):
    """SIGTERM to this process alone."""


class Flaky(NamedTuple):
    test: str
    reason: str


class Run:
    def __init__(self, folder: Path, *, only_engine: bool) -> None:
        self._folder = folder
        self._only_engine = only_engine
        self._everything = IN_CI or only_engine
        self._began = time.monotonic()
        self._results: list[Results] = []
        self._failed: dict[str, str] = {}
        self._flaky: list[Flaky] = []
        self._broken: list[str] = []  # what failed beside the tests

    def whole(self) -> int:
        self._look()
        background = self._prepare()
        try:
            for phase in PHASES:
                if not (self._only_engine and phase.name == "parallel"):
                    self._phase(phase)
            self._look_for_containers()
        except KeyboardInterrupt:
            self._broken.append("interrupted")
        finally:
            for process in background:
                process.terminate()
                process.wait()
        self._summary()
        return 1 if self._failed or self._broken else 0

    def _look(self) -> None:
        if IN_CI and any(each.packages or each.script for each in components.required()):
            names = ", ".join(each.name for each in components.required())
            print(f"== CI=true: installing what is missing: {names}", flush=True)
            subprocess.run([ROOT / "scripts/test-components"], check=False)
            components.forget()
        print("== what this machine has", *components.table(), sep="\n", flush=True)
        self._broken += [
            f"missing component: {each.name}: {components.missing(each.name)}"
            for each in components.required()
        ]

    def _prepare(self) -> list[subprocess.Popen[bytes]]:
        """With CI=true: what takes long to make, while the first tests run."""
        if not IN_CI:
            return []
        modules = ["frameworks", "node_sdks"]
        modules += [] if components.missing("docker") else ["layers"]
        log = (self._folder / "prepare.log").open("wb")
        return [
            subprocess.Popen(
                ["nice", sys.executable, "-m", f"tests.support.{module}"], stdout=log, stderr=log
            )
            for module in modules
        ]

    def _phase(self, phase: Phase) -> None:
        marks = phase.marks if self._everything else f"{phase.marks} and not slow"
        if self._only_engine:
            marks = f"engine and ({marks})"
        found = Plan.read(self._folder)
        if found is not None and not found.files.get(phase.name):
            return
        files = found.files[phase.name] if found is not None else []
        known = found is not None and not self._only_engine
        count = f": {found.counts[phase.name]:,} tests" if found and known else ""
        print(f"\n== {phase.title}{count}", flush=True)
        workers = ["-n", str(_workers()), "--dist", "worksteal"] if phase.parallel else []
        code, results = self._pytest(phase.name, "-m", marks, *workers, *files)
        self._results.append(results)
        if code not in (0, 1, NONE_COLLECTED):
            self._broken.append(f"pytest ended with {code} in the phase '{phase.title}'")
            print((self._folder / f"{phase.name}.log").read_text()[-5000:], flush=True)
        self._failed |= self._retried(phase, results.failed)

    def _pytest(self, name: str, *arguments: str) -> tuple[int, Results]:
        env = {**os.environ, FOLDER: str(self._folder), PHASE: name}
        process = subprocess.Popen([*PYTEST, *arguments], cwd=ROOT, env=env)
        try:
            code = process.wait()
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated):  # a terminal interrupts both
                process.send_signal(signal.SIGINT)
            process.wait()
            self._results.append(read(self._folder, name))
            self._failed |= self._results[-1].failed
            raise
        return code, read(self._folder, name)

    def _retried(self, phase: Phase, failed: dict[str, str]) -> dict[str, str]:
        """What fails again, alone. What passes then is flaky, which is a defect of its own."""
        tests = [name for name in failed if "::" in name]
        if not tests or len(failed) > MOST_RETRIED:
            return failed
        print(f"== once more, one at a time: {len(tests)} that failed", flush=True)
        _, again = self._pytest(f"{phase.name}-again", *tests)
        unproven = again.failed | again.skipped
        passed = [name for name in tests if name in again.seconds and name not in unproven]
        self._flaky += [Flaky(name, failed[name]) for name in passed]
        return {name: reason for name, reason in failed.items() if name not in passed}

    def _look_for_containers(self) -> None:
        if left := supervisor.left():
            self._broken += [f"a container that no test removed: {each}" for each in left]

    def _summary(self) -> None:
        passed = sum(each.passed for each in self._results) + len(self._flaky)
        expected = sum(each.expected for each in self._results)
        skipped = Counter(why for each in self._results for why in each.skipped.values())
        plan = Plan.read(self._folder)
        left_out = dict(plan.left_out) if plan else {}
        if self._everything:
            left_out.pop("slow", None)
        took = minutes(time.monotonic() - self._began)

        print(f"\n== result, after {took} minutes")
        if left_out:
            print("left out:")
            for name, count in sorted(left_out.items(), key=lambda each: -each[1]):
                print(f"  {count:6,}  {_why_left_out(name)}")
        if skipped:
            print("skipped while they ran:")
            for why, count in skipped.most_common():
                print(f"  {count:6,}  {why.splitlines()[0][:150]}")
        seconds = {name: each.seconds[name] for each in self._results for name in each.seconds}
        print("slowest:")
        for name in sorted(seconds, key=lambda each: -seconds[each])[:SLOWEST]:
            print(f"  {seconds[name]:6.1f} s  {name}")
        if self._flaky:
            print("flaky: failed, then passed alone. A defect of the test or of Capsule:")
            for flaky in self._flaky:
                print(f"  {flaky.test}\n      {flaky.reason}")
        if self._failed:
            print("failed:")
            for name, reason in self._failed.items():
                print(f"  {name}\n      {reason}")
            names = " ".join(f"'{name}'" for name in list(self._failed)[:MOST_RETRIED])
            which = (
                f"again, the first {MOST_RETRIED}" if len(self._failed) > MOST_RETRIED else "again"
            )
            print(f'{which}: make test ARGS="{names}"')
        for what in self._broken:
            print(what)
        total = f"{passed:,} passed, {len(self._failed):,} failed, {len(self._flaky)} flaky"
        print(f"{total}, {expected} failed as expected, {sum(left_out.values()):,} left out")
        print(f"{passed} passed, {len(self._failed)} failed, {sum(skipped.values())} skipped")


def _why_left_out(name: str) -> str:
    if name == "slow":
        return "slow: what takes longest; run them: CI=true make test"
    component = components.COMPONENTS[name]
    return f"{name}: {components.missing(name)}; get it: {component.command}"


def _workers() -> int:
    """The tests wait more than they compute."""
    return min(2 * len(os.sched_getaffinity(0)), 12)


def _terminate(*_: object) -> None:
    raise Terminated


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments != ["--docker"]:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    # Handled, so that what we start does not inherit that a background run ignores them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    folder = Path(tempfile.mkdtemp(prefix="capsule-test-run-"))
    os.environ[PLAN] = str(folder)
    supervisor.own_the_run()
    try:
        return Run(folder, only_engine=bool(arguments)).whole()
    finally:
        with suppress(FileNotFoundError):
            supervisor.release()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
