"""The command line in processes of its own, on pipes and on a terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from capsule_sdk import Capsule, CapsuleClient
from tests.support import clean_env
from tests.support.nursery import OWN, Born
from tests.support.servers import CAPSULE, RealServer


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Cli:
    env: dict[str, str]
    cwd: Path

    def __call__(self, *args: str | Path, input: str | None = None, **env: str) -> Outcome:
        if all(name.startswith("CAPSULE_") for name in env):
            return self._forked(*map(str, args), input=input, env={**self.env, **env})
        # Variables of Python itself need a new process.
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {}
        done = subprocess.run(
            [*CAPSULE, *map(str, args)],
            env={**self.env, **env},
            cwd=self.cwd,
            input=input,
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def _forked(self, *args: str, input: str | None, env: dict[str, str]) -> Outcome:
        ours = f"/proc/{os.getpid()}/fd"
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, ExitStack() as stack:
            source = os.devnull
            if input is not None:
                reading, writing = os.pipe()
                source = f"{ours}/{reading}"
                stdin = stack.enter_context(open(writing, "wb"))
            streams = [source, f"{ours}/{out.fileno()}", f"{ours}/{err.fileno()}"]
            pid = OWN.nursery.start(*args, streams=streams, env=env, cwd=str(self.cwd))
            if input is not None:
                os.close(reading)
                with suppress(BrokenPipeError):
                    stdin.write(input.encode())
                    stdin.close()
            process = Born(OWN.nursery, pid)
            try:
                code = process.wait(110)
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            return Outcome(code, out.read().decode(), err.read().decode())

    def popen(self, *args: str | Path, **options: Any) -> subprocess.Popen[str]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
        command = [*CAPSULE, *map(str, args)]
        return subprocess.Popen(command, env=self.env, cwd=self.cwd, text=True, **options)

    @property
    def runs(self) -> Path:
        """Where `capsule run` keeps what belongs to one run."""
        return Path(self.env["CAPSULE_RUN_DIR"]) / "runs"

    def leftovers(self) -> list[str]:
        return [path.name for path in self.runs.iterdir()] if self.runs.is_dir() else []


@pytest.fixture(scope="session")
def cli_base(agent_binary: Path) -> Iterator[Path]:
    """Shared by the session: it takes a moment to make what all runs reuse."""
    base = Path(tempfile.mkdtemp(prefix="cc-", dir="/tmp"))
    base.chmod(0o755)
    yield base
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def cli(cli_base: Path, tmp_path: Path) -> Iterator[Cli]:
    """`capsule` without a server, in an empty folder."""
    dirs = {"CAPSULE_DATA_DIR": str(cli_base / "data"), "CAPSULE_RUN_DIR": str(cli_base / "run")}
    made = Cli(clean_env(**dirs), tmp_path)
    yield made
    for name in made.leftovers():  # of a test that failed: the next one looks for its own
        shutil.rmtree(made.runs / name, ignore_errors=True)


@pytest.fixture
def remote(server: RealServer, tmp_path: Path) -> Cli:
    """`capsule` with a server to talk to."""
    return Cli(clean_env(CAPSULE_URL=server.url), tmp_path)


@pytest.fixture
def capsule(server: RealServer) -> Iterator[Capsule]:
    with CapsuleClient(server.url) as client, client.create("python") as made:
        yield made
