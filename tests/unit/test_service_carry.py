"""What programs report for their session: hostile bytes in, variables out or nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.service.carry import MAX_MESSAGE, Session, parse, update, wrap

NAMES = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1)
VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
OWN = {"_", "SHLVL", "PWD", "OLDPWD"}


def message(cwd: str, env: dict[str, str]) -> bytes:
    variables = "".join(f"{name}={value}\0" for name, value in env.items())
    return f"capsule1\0{cwd}\0{variables}\0".encode()


@given(st.binary(max_size=2000))
def test_no_bytes_break_it(data: bytes) -> None:
    parse(data)
    parse(b"capsule1\0" + data)
    parse(b"capsule1\0" + data + b"\0\0")


@given(st.dictionaries(NAMES, VALUES))
def test_an_environment_comes_back_as_it_was(env: dict[str, str]) -> None:
    found = parse(message("/a b/ü", env))
    assert found is not None
    assert found.cwd == "/a b/ü"
    assert found.env == {name: value for name, value in env.items() if name not in OWN}


@given(st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, VALUES))
def test_the_next_call_starts_with_what_the_last_one_left(
    before: dict[str, str], after: dict[str, str]
) -> None:
    found = parse(message("/tmp", after))
    assert found is not None
    session = update(Session(), before, found)
    left = {name: value for name, value in after.items() if name not in OWN}
    kept = {name: value for name, value in before.items() if name in OWN}
    assert session.apply(before) == {**left, **kept}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"capsule1\0/tmp\0A=1\0",  # cut off
        b"capsule2\0/tmp\0\0",
        b"capsule1\0/tmp\0" + b"A=1\0" * 2000 + b"\0",
        b"capsule1\0/tmp\0A=" + b"x" * MAX_MESSAGE + b"\0\0",
    ],
)
def test_malformed_reports_are_dropped_as_a_whole(data: bytes) -> None:
    assert parse(data) is None


def run(argv: tuple[str, ...], report: Path) -> tuple[int, str, str]:
    """Run a program as the agent does, with `report` behind fd 3."""
    start = ("sh", "-c", 'exec "$@" 3>"$0"', str(report), *argv)
    done = subprocess.run(start, capture_output=True, text=True, timeout=10, env=dict(os.environ))
    return done.returncode, done.stdout, done.stderr


LEAVES = "export LEFT=behind; cd /tmp"


@pytest.mark.parametrize(
    "script",
    [
        f"{LEAVES}; trap 'echo bye $?; exit 7' EXIT; exit 3",
        f"set -eu; clean() {{ local s=$?; echo bye $s; exit $s; }}\n"
        f"trap clean EXIT INT TERM; {LEAVES}; exit 4",
        f"f() {{ trap 'echo bye' EXIT; {LEAVES}; return 2; }}; f; exit 5",
        f"trap 'echo one' EXIT; trap - EXIT; {LEAVES}; exit 6",
        f"trap '' EXIT; {LEAVES}; exit 6",
        f"""trap -- 'echo "it'"'"'s $1 of $#"' EXIT; {LEAVES}""",
        f"trap $'cat <<X\\nsaid\\nX\\n' EXIT; {LEAVES}",
        f"{LEAVES}; (trap 'echo below' EXIT; export LEFT=lost; cd /); trap 'echo bye' EXIT",
        f"trap 'echo bye' EXIT; old=$(trap -p EXIT); trap 'echo no' EXIT; eval \"$old\"; {LEAVES}",
        f"trap 'echo got it' USR1; trap 'echo bye' EXIT; {LEAVES}; kill -USR1 $$",
        f"{LEAVES}; trap 'echo bye' EXIT; set -x; :; set +x",
    ],
)
def test_a_trap_of_the_scripts_own_runs_and_the_session_learns(script: str, tmp_path: Path) -> None:
    argv = ("bash", "-c", script, "name", "first", "second")
    wrapped = wrap(argv)
    assert wrapped is not None
    assert run(wrapped, tmp_path / "report") == run(argv, tmp_path / "nothing")
    found = parse((tmp_path / "report").read_bytes())
    assert found is not None
    assert (found.env.get("LEFT"), found.cwd) == ("behind", "/tmp")
