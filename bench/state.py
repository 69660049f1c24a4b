"""What keeps state: runs in a live interpreter, snapshots and forks."""

from __future__ import annotations

from bench.capsule import TEMPLATE, clock
from bench.rivals import Rival
from bench.stats import Measure
from capsule_sdk import CapsuleClient, NotSupportedError

TARGET = 2.5  # DESIGN §6
FORKS = 4
REPEAT = 3
STEPS = 20


class Contexts(Rival):
    """Runs in an interpreter that lives on, and what it takes to have one."""

    def __init__(self, url: str) -> None:
        self._run = Measure("Capsule SDK: run `1 + 1` in a context", "context", target=TARGET)
        self._shell = Measure("Capsule SDK: run `:` in a context of bash", "context")
        self._first = Measure("Capsule SDK: create a context, first run", "context")
        self.measures = [self._run, self._shell, self._first]
        self._client = CapsuleClient(url)
        self._sandbox = self._client.create("python")
        self._context = self._sandbox.context()
        self._bash = self._sandbox.context("bash")

    def round(self, count: int) -> None:
        for _ in range(count):
            with clock(self._run):
                text = self._context.run("1 + 1").text
            if text != "2":
                raise SystemExit(f"bench: 1 + 1 is {text!r} in a context")
            with clock(self._shell):
                self._bash.run(":")
        with clock(self._first):
            context = self._sandbox.context()
            context.run("1 + 1")
        context.delete()

    def close(self) -> None:
        self._sandbox.delete()
        self._client.close()


def layers(url: str, sizes: list[int]) -> list[Measure]:
    """Snapshot, create from it and fork, against the MiB that the sandbox wrote."""
    measures: list[Measure] = []
    with CapsuleClient(url) as client:
        for mib in sizes:
            try:
                measures += layer(client, mib)
            except NotSupportedError as error:
                return [Measure("Capsule: snapshot", "snapshot", missing=error.message)]
    return measures


def layer(client: CapsuleClient, mib: int) -> list[Measure]:
    save, start, fork = (
        Measure(f"Capsule SDK: {what}, {mib:,} MiB", "snapshot", series=series, at=mib)
        for what, series in (
            ("snapshot", "snapshot"),
            ("create from it", "create from a snapshot"),
            (f"fork into {FORKS}", f"fork into {FORKS}"),
        )
    )
    with client.create(TEMPLATE) as sandbox:
        sandbox.exec(f"head -c {mib << 20} /dev/urandom > layer").check()
        for number in range(REPEAT):
            name = f"bench-{mib}-{number}"
            with clock(save):
                sandbox.snapshot(name)
            with clock(start):
                copy = client.create(snapshot=name)
            copy.delete()
            client.snapshots.delete(name)
            with clock(fork):
                forks = sandbox.fork(FORKS)
            for copy in forks:
                copy.delete()
    return [save, start, fork]


def steps(url: str, counts: list[int]) -> list[Measure]:
    """An exec that changes one file and leaves a restore point, against the number of files."""
    measures = []
    with CapsuleClient(url) as client:
        for files in [0, *counts]:
            named = f"with a step, one of {files:,} files" if files else "without steps"
            measures.append(Measure(f"Capsule SDK: exec that changes a file, {named}", "steps"))
            with client.create(TEMPLATE, checkpoint="each" if files else None) as sandbox:
                folders = f"seq -f d%g {files // 50} | while read d; do mkdir $d; cd $d; "
                sandbox.exec(f"{folders} seq 50 | split -l 1 -a 3; cd ..; done").check()
                for number in range(STEPS):
                    with clock(measures[-1]):
                        sandbox.exec(f"echo {number} > d1/xaaa || echo {number} > x").check()
    return measures
