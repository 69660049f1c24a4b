"""The suite's own tools: an ordinary user to run as, and tests that are left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import support
from tests.escape.attempt import LOCAL
from tests.support import ROOT, components
from tests.support.users import User


def test_an_ordinary_user_has_no_rights_a_home_and_capsule(as_user: User) -> None:
    said = as_user.run("sh", "-c", 'id -u; cd && touch here && echo "$HOME"').stdout.split()
    assert said == [str(as_user.uid), str(as_user.home)]
    assert as_user.uid != 0
    assert as_user.run("cat", "/etc/shadow").returncode != 0
    ended = as_user.run(as_user.python, "-c", "import capsule.errors, msgspec")
    assert ended.returncode == 0, ended.stderr


def collected(*paths: str, lacking: tuple[str, ...] = ()) -> tuple[set[str], str]:
    """The tests of a machine that has all components but these, and the last lines of pytest."""
    found = {name: "it is not here" if name in lacking else "" for name in components.COMPONENTS}
    kept = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *paths],
        env={**kept, components.FOUND: json.dumps(found)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {line for line in lines if "::" in line}, "\n".join(lines[-5:])


@pytest.mark.timeout(120)
def test_without_an_engine_every_local_attack_is_tried() -> None:
    complete, _ = collected("tests/escape")
    without, said = collected("tests/escape", lacking=("docker",))
    for cell in LOCAL:
        attacks = {each for each in complete if each.endswith(f"{cell}]")}
        assert len(attacks) > 100 and attacks <= without
    assert not [each for each in without if each.endswith("docker]")]
    left_out = len(complete) - len(without)
    assert f"left out: {left_out} that need docker: it is not here; " in said
    assert f"({left_out} deselected)" in said


@pytest.mark.timeout(120)
def test_a_marker_and_a_fixture_leave_a_test_out() -> None:
    marked, engine, other = (
        f"tests/{name}.py"
        for name in ("unit/test_kernel_node", "images/test_faults", "unit/test_kernel_bash")
    )
    without, said = collected(marked, engine, other, lacking=("node", "dockerd"))
    files = {each.split("::")[0] for each in without}
    assert files == {other}
    assert "that need node: it is not here" in said and "that need dockerd" in said


def test_an_unknown_component_is_an_error() -> None:
    for each in components.FIXTURES.values():
        assert not {*each} - {*components.COMPONENTS}
    with pytest.raises(LookupError, match="no component 'nosuch'"):
        components.first_missing(["nosuch"])


@pytest.mark.parametrize(("uid", "excused"), [(0, ()), (1000, components.ROOTS_OWN)])
def test_in_ci_every_component_is_required_but_what_only_root_can_have(
    monkeypatch: pytest.MonkeyPatch, uid: int, excused: tuple[str, ...]
) -> None:
    monkeypatch.setenv(components.FOUND, json.dumps(dict.fromkeys(components.COMPONENTS, "no")))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    for in_ci in (False, True):
        monkeypatch.setattr(components, "IN_CI", in_ci)
        wanted = {*components.COMPONENTS} - {*excused} if in_ci else set()
        assert {each.name for each in components.required()} == wanted


@pytest.mark.parametrize(
    ("in_ci", "raised"), [(False, pytest.skip.Exception), (True, pytest.fail.Exception)]
)
def test_what_is_missing_at_run_time_is_a_failure_in_ci(
    monkeypatch: pytest.MonkeyPatch, in_ci: bool, raised: type[Exception]
) -> None:
    monkeypatch.setattr(support, "IN_CI", in_ci)
    with pytest.raises(raised, match="no dockerd"):
        support.component_missing("no dockerd")
