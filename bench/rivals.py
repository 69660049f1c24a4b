"""What Capsule is measured against, in the same run: the bare kernel, and other ways to make a box.

Nothing is installed here. A rival that is not on this machine says so in the table.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

import httpx

from bench.stats import Measure

SYSTEM_LINKS = ("bin", "sbin", "lib", "lib64")


def timed_ms(command: list[str]) -> float:
    """Start it, wait for it. Raises when it fails: a failed run is no measurement."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return (time.perf_counter() - start) * 1e3


class Rival(ABC):
    """Measured a few samples per round, so that a noisy minute hits everybody alike."""

    measures: list[Measure]

    @abstractmethod
    def round(self, count: int) -> None:
        """Add `count` samples to each measure."""

    @abstractmethod
    def close(self) -> None:
        """Remove what was made for measuring."""

    def give_up(self, why: str) -> None:
        for measure in self.measures:
            measure.missing = why


def compile_raw(program: Path) -> str:
    """Makes `program` of bench/raw.c. Why it could not; "": it could."""
    source = Path(__file__).with_name("raw.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler"
    made = subprocess.run(
        [compiler, "-O2", "-static", str(source), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        return f"raw.c does not compile: {made.stderr.strip().splitlines()[-1]}"
    return ""


class Raw(Rival):
    """clone + mounts + pivot_root, and fork + exec: bench/raw.c, timed inside."""

    def __init__(self) -> None:
        self._box = Measure("kernel: clone + mounts + pivot_root", "create")
        self._spawn = Measure("kernel: fork + exec, static binary", "exec")
        self.measures = [self._box, self._spawn]
        self._dir = Path(tempfile.mkdtemp(prefix="capsule-bench-"))
        self._program = self._dir / "raw"
        if why := compile_raw(self._program):
            self.give_up(why)

    def round(self, count: int) -> None:
        for mode, measure in (("box", self._box), ("spawn", self._spawn)):
            if measure.missing:
                continue
            told = subprocess.run(
                [str(self._program), mode, str(count)], capture_output=True, text=True
            )
            if told.returncode != 0:
                measure.missing = told.stderr.strip() or f"status {told.returncode}"
                continue
            measure.samples += [float(line) for line in told.stdout.split()]

    def close(self) -> None:
        shutil.rmtree(self._dir, ignore_errors=True)


class Local(Rival):
    """A plain subprocess from Python, and starting an interpreter."""

    def __init__(self) -> None:
        self._true = Measure("local subprocess `true`", "exec")
        self._python = Measure("local `python3 -c print(1)`", "run")
        self.measures = [self._true, self._python]
        self._interpreter = (
            "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
        )

    def round(self, count: int) -> None:
        for _ in range(count):
            self._true.samples.append(timed_ms(["/bin/true"]))
            self._python.samples.append(timed_ms([self._interpreter, "-c", "print(1)"]))

    def close(self) -> None:
        pass


class Echo(Rival):
    """An HTTP round trip to an app that does nothing, with the client that the SDK uses."""

    def __init__(self, url: str) -> None:
        self._echo = Measure("HTTP echo, bare ASGI app", "exec")
        self.measures = [self._echo]
        self._client = httpx.Client(base_url=url)

    def round(self, count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            self._client.get("/")
            self._echo.samples.append((time.perf_counter() - start) * 1e3)

    def close(self) -> None:
        self._client.close()


class Bubblewrap(Rival):
    def __init__(self) -> None:
        self._whole = Measure("bubblewrap: box + `true` + gone", "one-shot")
        self.measures = [self._whole]
        self._command = ["bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr"]
        for name in SYSTEM_LINKS:
            if os.path.islink(f"/{name}"):
                self._command += ["--symlink", f"usr/{name}", f"/{name}"]
        self._command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "true"]
        if shutil.which("bwrap") is None:
            self.give_up("bwrap is not installed (Debian: bubblewrap)")

    def round(self, count: int) -> None:
        if self._whole.missing:
            return
        try:
            self._whole.samples += [timed_ms(self._command) for _ in range(count)]
        except subprocess.CalledProcessError as error:
            self.give_up(error.stderr.decode(errors="replace").strip())

    def close(self) -> None:
        pass


class Bundle(Rival):
    """An OCI runtime without an engine: `run` of a bundle with the host's /usr, and gone again."""

    def __init__(self, program: str, *flags: str, found: Path | None = None) -> None:
        self._whole = Measure(f"{program}: box + `true` + gone", "one-shot")
        self.measures = [self._whole]
        self._dir = Path(tempfile.mkdtemp(prefix="capsule-bench-"))
        self._number = 0
        installed = found or shutil.which(program)
        self._command = [str(installed), *flags, "--root", str(self._dir / "state")]
        if installed is None:
            self.give_up(f"{program} is not installed")
        elif shutil.which("runc") is None:
            self.give_up("runc, which writes the bundle, is not installed")
        elif os.getuid() != 0:
            self.give_up(f"{program} is measured as root only")
        else:
            self._make_bundle()

    def _make_bundle(self) -> None:
        """The host's /usr read-only, as Capsule has it: the boxes hold the same."""
        for name in ("usr", "proc", "dev", "sys", "tmp"):
            (self._dir / "rootfs" / name).mkdir(parents=True)
        for name in SYSTEM_LINKS:
            (self._dir / "rootfs" / name).symlink_to(f"usr/{name}")
        subprocess.run(["runc", "spec"], cwd=self._dir, check=True)
        path = self._dir / "config.json"
        config = json.loads(path.read_text())
        config["process"].update(terminal=False, args=["/usr/bin/true"])
        usr = {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]}
        config["mounts"].append(usr)
        path.write_text(json.dumps(config))

    def round(self, count: int) -> None:
        if self._whole.missing:
            return
        for _ in range(count):
            self._number += 1
            name = f"capsule-bench-{os.getpid()}-{self._number}"
            try:
                taken = timed_ms([*self._command, "run", "--bundle", str(self._dir), name])
            except subprocess.CalledProcessError as error:
                self.give_up(error.stderr.decode(errors="replace").strip())
                return
            self._whole.samples.append(taken)

    def close(self) -> None:
        shutil.rmtree(self._dir, ignore_errors=True)
