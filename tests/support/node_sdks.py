"""E2B's packages for Node, kept outside the clone; see tests/e2b/node/package.json.

Run as a module this installs them if they are missing, as tests/support/frameworks.py does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from tests.support import ROOT
from tests.support.engine import CACHE
from tests.support.frameworks import FrameworksMissing, forget_unused, run
from tests.support.layers import locked

WANTED = [ROOT / "tests/e2b/node" / name for name in ("package.json", "package-lock.json")]


def node_sdks() -> Path:
    """The folder of modules that has them. Raises FrameworksMissing."""
    if shutil.which("npm") is None:
        raise FrameworksMissing("no npm here to install E2B's packages for Node with")
    folder = CACHE / "node"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / hashlib.sha256(b"".join(f.read_bytes() for f in WANTED)).hexdigest()[:16]
    complete = made / "complete"
    with locked(folder / "lock"):
        if not complete.exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            for file in WANTED:
                shutil.copy(file, made)
            run("npm", "ci", "--prefix", str(made), "--no-audit", "--no-fund", "--ignore-scripts")
            complete.touch()
            forget_unused(folder)
    os.utime(complete)
    return made / "node_modules"


if __name__ == "__main__":
    try:
        node_sdks()
    except FrameworksMissing as missing:
        sys.exit(str(missing))
