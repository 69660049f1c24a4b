"""The agent's own unit tests (agent/tests/unit.c), built with AddressSanitizer and UBSan."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_build() -> object:
    spec = importlib.util.spec_from_file_location("build_agent", ROOT / "agent" / "build_agent.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # builds the whole agent, with sanitizers
@pytest.mark.needs("cc")
@pytest.mark.timeout(300)
def test_agent_units_pass_under_the_sanitizers(tmp_path: Path) -> None:
    build = load_build()
    sources = [str(ROOT / "agent" / "tests" / "unit.c")]
    sources += [str(p) for p in sorted((ROOT / "agent").glob("*.c")) if p.name != "main.c"]
    binary = tmp_path / "unit"
    flags = [*build.flags(), *build.SANITIZE]  # type: ignore[attr-defined]
    subprocess.run(["cc", *flags, *sources, "-o", str(binary)], check=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    golden = ROOT / "spec" / "golden" / "frames.txt"
    result = subprocess.run(
        [str(binary), str(golden), str(scratch)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 0 failed" in result.stdout
