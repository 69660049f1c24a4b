"""`llm-sandbox` (PyPI) on the Engine and the image that Capsule's containers are measured with.

It is installed into an environment of its own below .cache, when `--peers` allows that, and runs in
a process of its own: one life of a session per line that it is sent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from bench.rivals import Rival
from bench.stats import Measure
from tests.support import ROOT, supervisor
from tests.support.engine import EngineApi, EngineMissing

ENOUGH = 3  # closing a session alone takes ten seconds
VENV = ROOT / ".cache" / "llm-sandbox"
# Without `skip_environment_setup` it makes a venv and asks PyPI for news before the first run.
LIVES = """
import json, sys, time
from llm_sandbox import SandboxSession
def timed(call):
    start = time.perf_counter(); call()
    return (time.perf_counter() - start) * 1e3
for _ in sys.stdin:
    session = SandboxSession(lang="python", image=sys.argv[1], skip_environment_setup=True,
                             runtime_configs={"network_mode": "none"})
    took = {"create": timed(session.open)}
    session.execute_command("ln -s /usr/bin/python3 /usr/local/bin/python")  # Debian has none
    told = []
    took["run"] = timed(lambda: told.append(session.run("print(1)")))
    took["delete"] = timed(session.close)
    assert told[0].stdout.strip() == "1", told
    print(json.dumps(took), flush=True)
"""


class LlmSandbox(Rival):
    """Open a session, run `print(1)`, close it."""

    def __init__(self, *, wanted: bool) -> None:
        self._took = {
            "create": Measure("llm-sandbox: open a session", "create on runc"),
            "run": Measure("llm-sandbox: run `print(1)`", "run on runc"),
            "delete": Measure("llm-sandbox: close it", "delete on runc"),
        }
        self._took[
            "delete"
        ].note = "it waits the 10 s that `docker stop` gives a pid 1 before SIGKILL"
        self.measures = list(self._took.values())
        self._held = ExitStack()
        self._process: subprocess.Popen[str] | None = None
        if not wanted:
            self.give_up("only with `make bench ARGS=--peers`, which installs it below .cache")
            return
        try:
            self._open()
        except (EngineMissing, subprocess.CalledProcessError) as error:
            self.give_up(str(error).splitlines()[0])

    def _open(self) -> None:
        python = VENV / "bin" / "python"
        if not python.exists():
            make_venv(python)
        shared = supervisor.acquire()
        api = EngineApi(shared.url)
        self._held.callback(api.close)
        image = shared.images(api).python
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", "-c", LIVES, image],
            env={**os.environ, "DOCKER_HOST": shared.url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, count: int) -> None:
        process = self._process
        if process is None or self.measures[0].missing or len(self.measures[0].samples) >= ENOUGH:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        told = process.stdout.readline()
        if not told:
            self.give_up(f"it ended with status {process.wait()}; see above")
            return
        for name, took in json.loads(told).items():
            self._took[name].samples.append(took)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
        self._held.close()


def make_venv(python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    install = [str(python), "-m", "pip", "install", "-q", "llm-sandbox[docker]"]
    subprocess.run(install, check=True, capture_output=True)
