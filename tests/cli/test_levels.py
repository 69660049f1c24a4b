"""`doctor` says what a sandbox then gets, also to a root that lacks capabilities."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.support.servers import CAPSULE


def commands_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if text in line else []
    return found


@pytest.mark.usefixtures("as_root")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("capabilities", "lacking"),
    [
        ("-kill", "KILL"),
        ("-sys_admin", ""),
        ("-all,+chown,+setuid,+setgid,+fowner,+dac_override", "KILL"),
        ("-all,+chown,+setuid,+setgid,+fowner,+dac_override,+kill", ""),
        ("-all", "CHOWN, KILL, SETGID, SETUID"),
    ],
)
def test_a_root_without_all_capabilities(cli: Cli, capabilities: str, lacking: str) -> None:
    def capsule(*args: str) -> subprocess.CompletedProcess[str]:
        prefix = ["setpriv", f"--bounding-set={capabilities}"]
        return subprocess.run(
            [*prefix, *CAPSULE, *args], env=cli.env, capture_output=True, text=True, check=False
        )

    report = json.loads(capsule("doctor", "--json").stdout)["providers"][0]
    assert report["provider"] == "local" and report["usable"]
    said = {each["name"]: each for each in report["findings"]}
    assert said[f"level {report['isolation']}"]["ok"]
    assert (f"lacks the capabilities {lacking}" in said["uid ranges"]["detail"]) == bool(lacking)
    began = time.monotonic()
    mark = secrets.token_hex(8)
    code = f"import time; print('ran', flush=True); time.sleep(77)  # {mark}"
    done = capsule("run", "--timeout", "2", code)
    assert done.stdout == "ran\n" and "timed out" in done.stderr
    assert time.monotonic() - began < 60, "the timeout ended it"
    assert not commands_with(mark)
