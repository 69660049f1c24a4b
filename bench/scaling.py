"""What happens when there is more of it: live sandboxes, clients, seconds, bytes."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.capsule import TEMPLATE, clock
from bench.stats import Measure
from capsule_sdk import AsyncCapsuleClient, CapsuleClient

MIB = 1 << 20
BLOCK = bytes(MIB // 4)
SAMPLES = 20
ROUNDS = 3  # not counted: a rush is behind us, and nothing is ready for who comes next
SETTLE = 10.0  # seconds that the kernel takes to forget a thousand cgroups and networks
OPERATIONS = ("create", "exec `true`", "delete")
IN_ANY = "exec in any of them"  # most have slept: not only how many there are makes it slower


async def crowd(url: str, counts: list[int], agent: Path) -> list[Measure]:
    """Create, exec and delete while `counts` others live; at the last of them, their memory.

    The fewest are measured again at the end: machines change their speed within minutes, and
    growth would be that.
    """
    memory = Measure("Capsule: memory of an idle sandbox", "scale", unit="KiB", target=1024.0)
    memory.note = "proportional set size of its agent processes"
    kernel = Measure("Capsule: the same with the kernel's part", "scale", unit="KiB")
    kernel.note = "MemAvailable before and after; noisy where others work"
    alive = Measure("Capsule: sandboxes alive together", "scale", unit="count")
    alive.target = float(max(counts))
    measures: list[Measure] = []
    made: list[Any] = []
    before, available = agent_kib(agent), available_kib()
    counts = sorted(set(counts))
    async with AsyncCapsuleClient(url) as client:
        for count in counts:
            if trouble := await fill(client, made, count):
                alive.note = f"first failure: {trouble}"
            measures += await among(client, made, count)
        alive.samples = [float(len(made))]
        if made:
            memory.samples = [(agent_kib(agent) - before) / len(made)]
            kernel.samples = [max(0.0, (available - available_kib()) / len(made))]
        await at_most(16, [sandbox.delete for sandbox in made[counts[0] :]])
        await asyncio.sleep(SETTLE)
        again = await among(client, made[: counts[0]], counts[0])
        for measure, more in zip(measures, again, strict=False):
            measure.samples += more.samples
        await at_most(16, [sandbox.delete for sandbox in made[: counts[0]]])
    return [alive, memory, kernel, *measures, *growth(measures, counts[0], counts[-1])]


def growth(measures: list[Measure], few: int, many: int) -> list[Measure]:
    """How many times as long each takes among many."""
    grown = []
    for what in (*OPERATIONS, IN_ANY):
        least, most = (
            next(m.p50 for m in measures if (m.series, m.at) == (what, count) and m.samples)
            for count in (few, many)
        )
        note = f"p50 with {many:,} alive, divided by that with {few:,} before and after"
        name = f"Capsule: growth of {what}"
        grown.append(Measure(name, "scale", unit="×", samples=[most / least], note=note))
    return grown


async def fill(client: AsyncCapsuleClient, made: list[Any], count: int) -> str:
    """Until `count` live. The first failure, if there was one."""

    async def one() -> None:
        made.append(await client.create(TEMPLATE, ttl=3600))

    results = await at_most(16, [one] * (count - len(made)))
    return next((repr(told) for told in results if isinstance(told, BaseException)), "")


async def among(client: AsyncCapsuleClient, others: list[Any], count: int) -> list[Measure]:
    for _ in range(ROUNDS):
        await (await client.create(TEMPLATE)).delete()
    create, run, delete, in_any = (
        Measure(f"Capsule: {what}, {count:,} alive", "growth", series=what, at=count)
        for what in (*OPERATIONS, IN_ANY)
    )
    for _ in range(SAMPLES):
        with clock(create):
            sandbox = await client.create(TEMPLATE)
        for _ in range(2):
            with clock(run):
                (await sandbox.exec(["true"])).check()
            with clock(in_any):
                (await random.choice(others).exec(["true"])).check()
        with clock(delete):
            await sandbox.delete()
    return [create, run, in_any, delete]


async def at_most(count: int, calls: list[Callable[[], Awaitable[None]]]) -> list[Any]:
    gate = asyncio.Semaphore(count)

    async def one(call: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await call()

    return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)


async def sustained(url: str, seconds: float) -> list[Measure]:
    """Creates per second for so long; each is deleted, as it could not go on otherwise."""
    rate = Measure("Capsule: creates per second", "rate", unit="1/s")
    begun = time.monotonic()
    done: list[float] = []
    async with AsyncCapsuleClient(url) as client:

        async def worker() -> None:
            while time.monotonic() < begun + seconds:
                sandbox = await client.create(TEMPLATE)
                done.append(time.monotonic() - begun)
                await sandbox.delete()

        await asyncio.gather(*(worker() for _ in range(4)))
    rate.samples = [float(sum(int(at) == second for at in done)) for second in range(int(seconds))]
    rate.note = f"and as many deletes, 4 clients, {seconds:.0f} s; each second is a sample"
    return [rate]


async def throughput(url: str, seconds: float) -> list[Measure]:
    """Execs of `true` per second, by 1, 8 and 64 clients on 8 sandboxes."""
    measures = []
    async with AsyncCapsuleClient(url) as client:
        sandboxes = [await client.create(TEMPLATE) for _ in range(8)]
        for clients in (1, 8, 64):
            name = f"Capsule: execs per second, {clients} client{'s' * (clients > 1)}"
            rate = Measure(name, "rate", unit="1/s", series="execs per second", at=clients)
            begun, cpu = time.monotonic(), time.process_time()
            rate.samples = [await execs(sandboxes, clients, seconds)]
            share = (time.process_time() - cpu) / (time.monotonic() - begun)
            rate.note = f"the client took {share:.0%} of a core"
            measures.append(rate)
        for sandbox in sandboxes:
            await sandbox.delete()
    return measures


async def execs(sandboxes: list[Any], clients: int, seconds: float) -> float:
    begun, done = time.monotonic(), 0

    async def worker(number: int) -> None:
        nonlocal done
        while time.monotonic() < begun + seconds:
            (await sandboxes[number % len(sandboxes)].exec(["true"])).check()
            done += 1

    await asyncio.gather(*(worker(number) for number in range(clients)))
    return done / (time.monotonic() - begun)


def transfer(url: str, echo: str, mib: int) -> list[Measure]:
    """`mib` up and down through the API, beside the same bytes through bare HTTP and `cat`."""
    up = Measure(f"Capsule SDK: write {mib:,} MiB", "transfer up", unit="MiB/s")
    down = Measure(f"Capsule SDK: read {mib:,} MiB", "transfer down", unit="MiB/s")
    bare_up = Measure("bare HTTP: the same bytes", "transfer up", unit="MiB/s")
    bare_down = Measure("bare HTTP: the same bytes", "transfer down", unit="MiB/s")
    copied = Measure("`cat` from file to file", "transfer up", unit="MiB/s")
    blocks = mib * MIB // len(BLOCK)
    with CapsuleClient(url) as client, client.create(TEMPLATE, disk=(mib + 64) * MIB) as sandbox:
        with speed(up, mib):
            sandbox.write_file("large", (BLOCK for _ in range(blocks)))
        with speed(down, mib):
            taken = sum(len(chunk) for chunk in sandbox.read_stream("large"))
    if taken != mib * MIB:
        raise SystemExit(f"bench: {taken} bytes came back of {mib * MIB}")
    with httpx.Client(base_url=echo, timeout=60) as plain:
        with speed(bare_up, mib):
            plain.post("/", content=(BLOCK for _ in range(blocks)))
        with speed(bare_down, mib), plain.stream("GET", f"/{blocks}") as answer:
            for _ in answer.iter_raw():
                pass
    cat(copied, mib)
    return [up, bare_up, copied, down, bare_down]


def cat(measure: Measure, mib: int) -> None:
    with tempfile.TemporaryDirectory(prefix="capsule-bench-") as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        with source.open("wb") as file:
            for _ in range(mib * MIB // len(BLOCK)):
                file.write(BLOCK)
        with speed(measure, mib), target.open("wb") as output:
            subprocess.run(["cat", str(source)], stdout=output, check=True)


class speed:
    """Adds to a measure how many MiB went by per second."""

    def __init__(self, measure: Measure, mib: int) -> None:
        self._measure, self._mib = measure, mib

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._measure.samples.append(self._mib / (time.perf_counter() - self._start))


def agent_kib(agent: Path) -> float:
    """PSS of every process that runs the agent's binary: shared pages are shared out."""
    return sum(pss_kib(entry / "smaps_rollup") for entry in agents(agent))


def agents(agent: Path) -> Iterator[Path]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "exe").split(" (")[0] == str(agent):
                yield entry
        except OSError:
            continue


def pss_kib(path: Path) -> float:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0.0  # it has ended meanwhile
    return next((float(line.split()[1]) for line in lines if line.startswith("Pss:")), 0.0)


def available_kib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1])
    return 0.0
