"""`make bench`: measures Capsule beside the bare kernel and other sandboxes, in the same run.

Measures alternate in rounds, so that a noisy minute hits everybody alike. Installs nothing: what is
not on this machine is named in the table with its reason. Takes less than three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from bench import capsule, report
from bench.contained import Contained
from bench.pool import Warm, WarmInside
from bench.rivals import Bubblewrap, Echo, Local, Raw, Rival, Runc
from bench.server import capsule_server, echo_server
from bench.stats import Measure
from capsule.agentbin import find
from tests.support import supervisor

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = arguments()
    started, load = time.monotonic(), os.getloadavg()[0]
    with capsule_server(max_sandboxes=max(options.live, 128) + 16) as url, echo_server() as echo:
        measures = alternate(url, echo, rounds=options.rounds, deadline=started + options.seconds)
        say(f"{options.burst} at once")
        measures += asyncio.run(capsule.burst(url, options.burst))
        say(f"{options.live} alive together")
        measures += asyncio.run(capsule.crowd(url, options.live, find()))
    print(report.table(measures))
    print(f"\n{report.conditions(load)}")
    RESULTS.mkdir(exist_ok=True)
    report.write_json(RESULTS / "bench.json", measures, load)
    report.write_plot(RESULTS / "bench.svg", measures)
    print(f"written to {RESULTS}/bench.json and bench.svg in {time.monotonic() - started:.0f} s")
    missed = [m.name for m in measures if report.verdict(m).startswith("MISSED")]
    if missed and options.strict:
        sys.exit(f"targets missed: {', '.join(missed)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measure Capsule")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 5 samples per measure")
    parser.add_argument("--burst", type=int, default=100, help="creates at once")
    parser.add_argument("--live", type=int, default=200, help="sandboxes alive together")
    parser.add_argument("--seconds", type=float, default=90, help="longest time for the rounds")
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed")
    return parser.parse_args()


def alternate(url: str, echo: str, *, rounds: int, deadline: float) -> list[Measure]:
    rivals: list[Rival] = [
        capsule.Sdk(url),
        capsule.Http(url),
        capsule.Inside(),
        Warm(),
        WarmInside(),
        Raw(),
        Local(),
        Echo(echo),
        Bubblewrap(),
        Runc(),
        Contained("runc", faster=10, burst=50),
        Contained("runsc", faster=5),
    ]
    try:
        for number in range(rounds):
            if time.monotonic() > deadline:
                say(f"time is up after {number} of {rounds} rounds")
                break
            say(f"round {number + 1} of {rounds}")
            for rival in rivals:
                rival.round(5)
    finally:
        for rival in rivals:
            rival.close()
        if supervisor.own_the_run():
            supervisor.release()
    say("")
    return [measure for rival in rivals for measure in rival.measures]


def say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
