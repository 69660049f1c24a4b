"""`make test` shows what happened, and ends with the right code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import run
from tests.support import ROOT, components

TESTS = """
import pathlib, pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("no such kernel")
@pytest.mark.xfail(strict=True)
def test_known(): assert False
def test_skips_when_tried_again():
    seen = pathlib.Path(__file__).with_name("tried")
    if seen.exists(): pytest.skip("the Engine is gone")
    seen.touch()
    assert False, "before it was gone"
def test_flaky():
    seen = pathlib.Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first, "the first time"
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A phase over a small suite of its own."""
    tests = tmp_path / "test_small.py"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = [
        part for name in ("randomly", "asyncio", "schemathesis") for part in ("-p", f"no:{name}")
    ]
    monkeypatch.setattr(run, "PYTEST", [*run.PYTEST, *options])
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(run, "PHASES", (run.Phase("parallel", "small", "not serial", False),))
    monkeypatch.setattr(run.Run, "_prepare", lambda self: [])
    monkeypatch.setattr(components, "required", lambda: [])
    return tests


def test_failures_are_named_with_their_reason(
    suite: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    suite.write_text(TESTS)
    assert run.Run(tmp_path, only_engine=False).whole() == 1
    shown, _, result = capfd.readouterr().out.partition("== result")
    assert "FAILED test_small.py::test_fails" in shown, "when it happens"
    assert "== once more, one at a time: 3 that failed" in shown
    flaky, _, failed = result.partition("\nfailed:\n")
    assert "test_small.py::test_flaky\n      AssertionError: the first time" in flaky
    assert "test_small.py::test_fails\n      assert 1 == 2" in failed
    assert "1  no such kernel" in flaky
    assert "test_small.py::test_skips_when_tried_again\n      AssertionError: before" in failed
    assert "again: make test ARGS=\"'test_small.py::test_fails' 'test_small.py::" in failed
    assert "2 passed, 2 failed, 1 flaky, 1 failed as expected, 0 left out" in failed


def test_a_green_run_ends_with_0(
    suite: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    suite.write_text("def test_passes(): pass\n")
    assert run.Run(tmp_path, only_engine=False).whole() == 0
    assert "1 passed, 0 failed, 0 skipped" in capfd.readouterr().out


def test_in_ci_what_is_missing_is_installed_or_fails_the_run(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite.write_text("def test_passes(): pass\n")
    installer = tmp_path / "scripts" / "test-components"
    installer.parent.mkdir()
    installer.write_text("#!/bin/sh\necho no network here\n")
    installer.chmod(0o755)
    monkeypatch.setattr(run, "IN_CI", True)
    monkeypatch.setattr(components, "required", lambda: [components.COMPONENTS["go"]])
    monkeypatch.setattr(components, "missing", lambda name: f"{name} is not here")
    monkeypatch.setattr(components, "forget", lambda: None)
    assert run.Run(tmp_path, only_engine=False).whole() == 1
    began, _, result = capfd.readouterr().out.partition("== result")
    assert "CI=true: installing what is missing: go\nno network here\n== what" in began
    assert "missing component: go: go is not here" in result
    assert "1 passed, 0 failed" in result


def test_a_suite_that_cannot_be_imported_is_a_failure(
    suite: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    suite.write_text("import nothing_of_this_name\n")
    assert run.Run(tmp_path, only_engine=False).whole() == 1
    assert "No module named 'nothing_of_this_name'" in capfd.readouterr().out
