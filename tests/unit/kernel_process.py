"""A kernel as a plain process on this machine, spoken to as the server does."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import pytest
from _pytest.mark import ParameterSet

from capsule.service import kernel_wire as wire
from capsule.service.kernel_wire import Ended, Raised, Ready, Said, Shown, Splitter
from tests.support.engine import CACHE

NONCE = "fedcba9876543210"
OPTIONS = {
    "python": ("-u", "-c"),
    "node": ("--no-force-async-hooks-checks", "-e"),
    "bash": ("-c",),
}
SOURCES = {"python": "python.py", "node": "node.js", "bash": "bash.sh"}


def versions(program: str, others: Iterable[Path]) -> list[ParameterSet]:
    """The one of this machine; the oldest and newest of others, which are slow."""
    found = sorted(others, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parts[-3])])
    return [
        pytest.param(program, id=program),
        *(
            pytest.param(str(each), id=each.parts[-3], marks=pytest.mark.slow)
            for each in dict.fromkeys((*found[:1], *found[-1:]))
        ),
    ]


def pythons() -> list[ParameterSet]:
    """Python from 3.8 on, as installed beside the one that runs the tests."""
    beside = Path(sys.base_prefix).parent.glob("3.*/bin/python3")
    return versions("python3", [p for p in beside if int(p.parts[-3].split(".")[1]) >= 8])


def nodes() -> list[ParameterSet]:
    """Node, with the versions that scripts/test-components has unpacked."""
    return versions("node", CACHE.glob("node/*/bin/node"))


@dataclass
class Done:
    stdout: str = ""
    stderr: str = ""
    shown: list[Shown] = field(default_factory=list)
    error: Raised | None = None
    end: Ended | None = None

    @property
    def text(self) -> object:
        """Of the last expression."""
        main = [each for each in self.shown if each.main]
        return main[-1].text if main else None

    @property
    def status(self) -> str:
        assert self.end is not None
        return self.end.status


def plain(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


class KernelProcess:
    def __init__(self, kernel: str, program: str, *, imports: tuple[str, ...] = (), **env: str):
        source = (resources.files("capsule") / "kernels" / SOURCES[kernel]).read_text()
        self.kernel = kernel
        self._heard: queue.Queue[tuple[int, Said]] = queue.Queue()
        self._process = subprocess.Popen(
            [shutil.which(program) or program, *OPTIONS[kernel], source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/tmp",
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **env},
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=(n, pipe))
            for n, pipe in ((1, self._process.stdout), (2, self._process.stderr))
        ]
        for thread in self._threads:
            thread.start()
        self.number = self.pressed = 0
        self._send(wire.hello(kernel, NONCE, imports))
        self.ready = self._next(Ready)

    def _read(self, number: int, pipe: IO[bytes]) -> None:
        splitter = Splitter(NONCE)
        with pipe:
            while data := os.read(pipe.fileno(), 65536):
                for said in splitter.feed(data):
                    self._heard.put((number, said))

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _next(self, kind: type[Ready]) -> Ready:
        while True:
            _, said = self._heard.get(timeout=15)
            if isinstance(said, kind):
                return said

    def begin(self, code: str, **env: str) -> None:
        self.number += 1
        self._send(wire.run(self.kernel, self.number, code, env))

    def finish(self, *, pressing: bool = False) -> Done:
        done, missing = Done(), {1, 2}
        parts: dict[int, list[bytes]] = {1: [], 2: []}
        while missing:
            stream, said = self._hear(pressing=pressing)
            match said:
                case bytes():
                    parts[stream].append(said)
                case Shown():
                    done.shown.append(said)
                case Raised():
                    done.error = said
                case Ended(run=self.number):
                    missing.discard(stream)
                    done.end = said if stream == 1 else done.end
        done.stdout, done.stderr = (b"".join(parts[n]).decode() for n in (1, 2))
        return done

    def run(self, code: str, **env: str) -> Done:
        """`env` is for this run alone."""
        self.begin(code, **env)
        return self.finish()

    def interrupted(self, code: str, *, after: str) -> Done:
        """Run code, and interrupt it once it has printed `after`."""
        self.begin(code)
        self.hear_printed(after)
        self.interrupt()
        done = self.finish(pressing=self.kernel != "python")
        for _ in range(self.pressed if self.kernel == "bash" else 0):
            self.run("sleep 0.05")  # what was sent once too often is for this one
        return done

    def hear_printed(self, text: str) -> None:
        seen = ""
        while text not in seen:
            _, said = self._heard.get(timeout=15)
            assert isinstance(said, bytes)
            seen += said.decode()

    def _hear(self, *, pressing: bool) -> tuple[int, Said]:
        for _ in range(30 if pressing else 0):
            try:
                return self._heard.get(timeout=0.5)
            except queue.Empty:
                self.pressed += 1
                self.interrupt()  # as the server does: the last one may have been lost
        return self._heard.get(timeout=15)

    def raw(self, data: bytes) -> None:
        self._send(data)

    def interrupt(self) -> None:
        """As the server does."""
        word = wire.interrupt(self.kernel, self.number)
        self.raw(word) if word else self.signal()

    def signal(self, number: int = signal.SIGINT) -> None:
        os.killpg(self._process.pid, number)

    def wait(self) -> int:
        return self._process.wait(timeout=15)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=15)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        deadline = time.monotonic() + 15
        for thread in self._threads:
            thread.join(deadline - time.monotonic())
