"""E2B's own SDKs against this server: what a program that was written for E2B waits for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from bench.capsule import clock
from bench.rivals import Rival
from bench.scaling import speed
from bench.stats import Measure

if TYPE_CHECKING:
    from e2b_code_interpreter import Sandbox

GROUP = "e2b"
TRANSFER = "transfer with E2B's SDK"
LARGE = 100  # MiB
CREATE = "Capsule, E2B's SDK: Sandbox.create()"
RUN = "Capsule, E2B's SDK: commands.run(`true`)"
CODE = "Capsule, E2B's SDK: run_code(`1+1`)"
WRITE = "Capsule, E2B's SDK: files.write 1 KiB"
READ = "Capsule, E2B's SDK: files.read 1 KiB"
UP = f"Capsule, E2B's SDK: files.write {LARGE} MiB"
DOWN = f"Capsule, E2B's SDK: files.read {LARGE} MiB"


class E2b(Rival):
    def __init__(self, url: str) -> None:
        self._create = Measure(CREATE, GROUP, target=10.0)
        self._kill = Measure("Capsule, E2B's SDK: kill()", GROUP)
        self._run = Measure(RUN, GROUP, target=8.0)
        self._code = Measure(CODE, GROUP, target=6.0)
        self._write = Measure(WRITE, GROUP, target=4.0)
        self._read = Measure(READ, GROUP, target=4.0)
        self.measures = [
            *(self._create, self._run, self._code),
            *(self._write, self._read, self._kill),
        ]
        self._held = ExitStack()
        self._sandbox: Sandbox | None = None
        if why := missing():
            self.give_up(why)
            return
        self._held.enter_context(pointed_to(url))
        self._sandbox = sandbox()
        self._held.callback(self._sandbox.kill)
        self._sandbox.run_code("1")

    def round(self, count: int) -> None:
        if self._sandbox is None:
            return
        for _ in range(count):
            with clock(self._create):
                made = sandbox("base")
            with clock(self._kill):
                made.kill()
            with clock(self._run):
                self._sandbox.commands.run("true")
            with clock(self._code):
                text = self._sandbox.run_code("1+1").text
            if text != "2":
                raise SystemExit(f"bench: 1+1 is {text!r} for E2B's SDK")
            with clock(self._write):
                self._sandbox.files.write("small", bytes(1024))
            with clock(self._read):
                self._sandbox.files.read("small", format="bytes")

    def close(self) -> None:
        self._held.close()


def transfer(url: str) -> list[Measure]:
    """`LARGE` MiB up and down, three times."""
    up = Measure(UP, TRANSFER, unit="MiB/s")
    down = Measure(DOWN, TRANSFER, unit="MiB/s")
    if why := missing():
        up.missing = down.missing = why
        return [up, down]
    data = bytes(LARGE << 20)
    with pointed_to(url):
        made = sandbox()
        try:
            for _ in range(3):
                with speed(up, LARGE):
                    made.files.write("large", data)
                with speed(down, LARGE):
                    size = len(made.files.read("large", format="bytes"))
                if size != len(data):
                    raise SystemExit(f"bench: {size} bytes came back of {len(data)}")
        finally:
            made.kill()
    return [up, down]


def missing() -> str:
    """Why it cannot be measured; "": it can."""
    try:
        import e2b_code_interpreter  # noqa: F401
    except ImportError:
        return "e2b-code-interpreter is not installed"
    return ""


def sandbox(template: str | None = None) -> Sandbox:
    from e2b_code_interpreter import Sandbox

    return Sandbox.create(template, timeout=600)


@contextmanager
def pointed_to(url: str) -> Iterator[None]:
    """As a user does it: by the environment."""
    wanted = {
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "E2B_API_KEY": "e2b_" + "0" * 40,
        "NO_PROXY": "127.0.0.1,localhost",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
