"""Programs that use E2B's SDKs, in processes of their own."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

from tests.e2b.conftest import KEY
from tests.support import ROOT, clean_env
from tests.support.servers import RealServer


def settings(place: RealServer, **more: str) -> dict[str, str]:
    """All that a user sets."""
    return clean_env(
        E2B_API_URL=place.url,
        E2B_SANDBOX_URL=place.url,
        E2B_VOLUME_API_URL=place.url,
        E2B_API_KEY=KEY,
        NO_PROXY="127.0.0.1,localhost",
        **more,
    )


# On a busy machine the SDK's HTTP client (pyqwest, in Rust) may abort while Python ends, after the
# program has done all.
ENDS = (0, -signal.SIGABRT)


def run(*command: str, env: dict[str, str], cwd: Path = ROOT, within: float = 60) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=within)
    assert done.returncode in ENDS, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_node_tests(node: Path, name: str, env: dict[str, str]) -> None:
    script = Path(shutil.copy(ROOT / f"tests/e2b/node/{name}.test.mjs", node))
    run("node", "--test", "--test-force-exit", str(script), env=env, cwd=node, within=80)
