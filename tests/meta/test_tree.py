"""What is committed: no binary, no registry host, no path of one machine; small modules."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

# Written in pieces, so that this file does not find itself.
REGISTRIES = ["pypi" + r"\.org", "python" + "hosted", r"registry\.npm" + "js", r"npmjs\." + "org"]
MACHINE_PATHS = ["/work/" + r"(main|shared)\b", r"\.py" + "env", "/opt/" + "(pypi|wheels)"]
# Nothing of ours is in an index: whoever takes the name there would be installed.
INDEXED = [r"pip install +['\"]?capsule[-_]" + "s"]
FORBIDDEN = re.compile("|".join(REGISTRIES + MACHINE_PATHS + INDEXED))
EXECUTABLE = (b"\x7fELF", b"MZ", b"\xca\xfe\xba\xbe")


def committed() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: nothing is committed here")
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_binary_is_committed() -> None:
    assert not [path for path in committed() if path.read_bytes().startswith(EXECUTABLE)]


def test_no_registry_and_no_machine_path_is_committed() -> None:
    found = []
    for path in committed():
        text = path.read_bytes().decode("utf-8", "replace")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in FORBIDDEN.finditer(text)]
    assert not found


def test_pins_are_exact() -> None:
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert line.startswith(("#", "-r ")) or re.fullmatch(r"[\w.-]+==[\w.]+", line), line


def test_modules_stay_small() -> None:
    """A module has one noun; more than 600 lines mean that it has two."""
    modules = [*(ROOT / "src").rglob("*.py"), *(ROOT / "sdk").rglob("*.py")]
    modules = [path for path in modules if path.parent.name != "kernels"]  # run as one file each
    sizes = {path.name: len(path.read_text("utf-8").splitlines()) for path in modules}
    assert not {name: size for name, size in sizes.items() if size > 600}
