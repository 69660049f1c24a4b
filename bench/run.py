"""`make bench`: measures Capsule beside the bare kernel and other sandboxes, in the same run.

Measures alternate in rounds, so that a noisy minute hits everybody alike. Installs nothing unless
`--peers` says so: what is not on this machine is named in the table with its reason. Takes less
than three minutes; with `--long` the numbers of DESIGN §6 in full, in about six.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from bench import capsule, e2b, page, plots, report, scaling, state, targets
from bench.contained import Contained, Roomy
from bench.peers import LlmSandbox
from bench.pool import Warm, WarmInside
from bench.rivals import Bubblewrap, Bundle, Echo, Local, Raw, Rival
from bench.server import capsule_server, echo_server
from bench.stats import Measure
from capsule.agentbin import find
from tests.support import supervisor
from tests.support.engine import GVISOR, find_runsc

RESULTS = Path(__file__).parent / "results"
SHORT = (
    "shorter than --long: 200 sandboxes alive instead of 1,000, creates for 5 s instead of 30,"
    " 64 MiB of files instead of 1 GiB, layers up to 64 MiB instead of 512"
)


def main() -> None:
    options = arguments()
    started, load = time.monotonic(), os.getloadavg()[0]
    measures = measure(options)
    print(report.table(measures))
    print(f"\n{report.verdicts(measures)}")
    print(f"\n{report.conditions(load)}")
    if not options.long:
        print(SHORT)
    write(measures, load)
    print(f"written to {RESULTS} in {time.monotonic() - started:.0f} s")
    if options.docs:
        page.write(measures, load, RESULTS)
    missed = [judged.what for judged in targets.judge(measures) if not judged.holds]
    if missed and options.strict:
        sys.exit(f"targets missed: {', '.join(missed)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measure Capsule")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 5 samples per measure")
    parser.add_argument("--burst", type=int, default=100, help="creates at once")
    parser.add_argument("--live", type=int, help="sandboxes alive together; 200, long 1,000")
    parser.add_argument("--seconds", type=float, default=75, help="longest time for the rounds")
    parser.add_argument("--long", action="store_true", help="everything at its full size")
    parser.add_argument("--peers", action="store_true", help="install llm-sandbox below .cache")
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md anew")
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed")
    options = parser.parse_args()
    options.live = options.live or (1000 if options.long else 200)
    return options


def measure(options: argparse.Namespace) -> list[Measure]:
    with capsule_server(max_sandboxes=max(options.live, 128) + 16) as url, echo_server() as echo:
        measures = alternate(url, echo, options)
        say(f"{options.burst} at once")
        measures += asyncio.run(capsule.burst(url, options.burst))
        say("snapshots and forks")
        measures += state.layers(url, [1, 16, 64, *([256, 512] if options.long else [])])
        measures += state.steps(url, [100, 1000, 10_000])
        say("files")
        measures += scaling.transfer(url, echo, 1024 if options.long else 64)
        measures += e2b.transfer(url)
        say("throughput")
        measures += asyncio.run(scaling.throughput(url, 5 if options.long else 2))
        measures += asyncio.run(scaling.sustained(url, 30 if options.long else 5))
        say(f"{options.live} alive together")
        counts = [count for count in (1, 10, 100) if count < options.live]
        measures += asyncio.run(scaling.crowd(url, [*counts, options.live], find()))
    say("")
    return measures


def alternate(url: str, echo: str, options: argparse.Namespace) -> list[Measure]:
    rivals: list[Rival] = [
        capsule.Sdk(url),
        capsule.Http(url),
        capsule.Inside(),
        Warm(),
        WarmInside(),
        state.Contexts(url),
        e2b.E2b(url),
        Raw(),
        Local(),
        Echo(echo),
        Bubblewrap(),
        Bundle("runc"),
        Bundle("runsc", *GVISOR, "--ignore-cgroups", found=find_runsc()),
        Contained("runc", faster=10, burst=50),
        Contained("runsc"),
        Roomy("runsc", faster=5),
        LlmSandbox(wanted=options.peers),
    ]
    deadline = time.monotonic() + options.seconds
    try:
        for number in range(options.rounds):
            if number and time.monotonic() > deadline:
                say(f"time is up after {number} of {options.rounds} rounds")
                break
            say(f"round {number + 1} of {options.rounds}")
            for rival in rivals:
                rival.round(5)
    finally:
        for rival in rivals:
            rival.close()
        if supervisor.own_the_run():
            supervisor.release()
    return [measure for rival in rivals for measure in rival.measures]


def write(measures: list[Measure], load: float) -> None:
    RESULTS.mkdir(exist_ok=True)
    report.write_json(RESULTS / "bench.json", measures, load)
    plots.medians(RESULTS / "medians.svg", measures)
    plots.distributions(RESULTS / "distributions.svg", measures)
    plots.scaling(RESULTS / "scaling.svg", measures)


def say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
