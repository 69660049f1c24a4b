"""`make chaos`: a run, and what it found. Exits with 1 if something did not hold."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.chaos.model import Model, Violation
from tests.chaos.run import Options, run
from tests.support.folders import share_for_the_run
from tests.support.nursery import Nursery, nursery
from tests.support.users import ordinary_user, readable_capsule


def main() -> int:
    asked = arguments()
    options = Options(asked.minutes * 60, asked.seed, asked.clients, asked.lie)
    mounts = os.getuid() == 0 and not asked.user
    say(f"seed {asked.seed}, {asked.clients} clients, {asked.minutes:g} minutes")
    if not mounts:
        say("left out: a full disk, which takes root to mount one")
    try:
        with servers(asked.user) as nursery:
            model = asyncio.run(interruptible(nursery, options, mounts=mounts))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted: servers and boxes are ended, and their folders removed")
        return 130
    say(report(model))
    return bool(model.violations)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--lie", action="store_true", help="must find violations")
    parser.add_argument("--user", action="store_true", help="as root: an ordinary user's server")
    return parser.parse_args()


@contextmanager
def servers(user: bool) -> Iterator[Nursery]:
    with ExitStack() as stack:
        shared = share_for_the_run()
        if shared is not None:
            stack.callback(shutil.rmtree, shared, ignore_errors=True)
        whose = None
        if user:
            whose = stack.enter_context(ordinary_user(*stack.enter_context(readable_capsule())))
        yield stack.enter_context(nursery(whose))


async def interruptible(nursery: Nursery, options: Options, *, mounts: bool) -> Model:
    """SIGTERM is as Ctrl-C: what is running is ended, and nothing is left."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run(nursery, options, mounts=mounts)


def report(model: Model) -> str:
    counts = ", ".join(f"{count:,} {what}" for what, count in sorted(model.counts.items()))
    lines = [f"seed {model.seed}: {counts}; slowest answer {model.slowest:.1f} s"]
    if model.lied:
        lines.append(f"lies: {dict(model.lied)}")
    alike: dict[tuple[str, str], list[Violation]] = {}
    for each in model.violations:
        alike.setdefault((each.kind, each.what), []).append(each)
    lines += [f"{len(some)} × {some[0]}" for some in alike.values()]
    return "\n".join([*lines, f"{len(model.violations)} violations"])


if __name__ == "__main__":
    sys.exit(main())
