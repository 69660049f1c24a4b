"""Environments with what only some tests use, kept outside the clone: the frameworks of examples/
for agents, and what programs draw and calculate with.

Run as a module this makes those that are missing, so that they are there when a test asks: `make
test` does that while other tests run. Nothing else needs these packages, so they are not in .venv.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.support import ROOT
from tests.support.engine import CACHE
from tests.support.layers import UNUSED_DAYS, locked

PINS = ROOT / "requirements"


class FrameworksMissing(Exception):
    """They cannot be installed here, and why."""


def frameworks() -> Path:
    """The Python that has those for agents. Raises FrameworksMissing."""
    return environment("agents") / "bin/python"


def notebook() -> Path:
    """A folder to import matplotlib and pandas from. Raises FrameworksMissing."""
    (packages,) = environment("notebook").glob("lib/python3*/site-packages")
    return packages


def environment(name: str) -> Path:
    pins = PINS / f"{name}.txt"
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:16]
    complete = made / "complete"
    with locked(folder / "lock"):
        if not complete.exists():
            shutil.rmtree(made, ignore_errors=True)
            run(sys.executable, "-m", "venv", str(made))
            # What is never imported need not be compiled, and that is most of it.
            pip = [str(made / "bin/python"), "-m", "pip", "install", "-q", "--no-compile"]
            run(*pip, "--disable-pip-version-check", "-r", str(pins))
            complete.touch()
            forget_unused(folder)
    os.utime(complete)
    return made


def run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip().splitlines() or ["no reason given"]
        raise FrameworksMissing(f"what the tests use cannot be installed: {said[-1]}")


def forget_unused(folder: Path) -> None:
    for complete in folder.glob("*/complete"):
        if complete.stat().st_mtime < time.time() - UNUSED_DAYS * 86_400:
            shutil.rmtree(complete.parent)


if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or ("notebook", "agents"):
            environment(name)
    except FrameworksMissing as missing:
        sys.exit(str(missing))
