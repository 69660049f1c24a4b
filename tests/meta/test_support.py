"""The suite's own tools work, otherwise what they guard is not guarded."""

from __future__ import annotations

import pytest

from tests import support
from tests.support.users import User


def test_an_ordinary_user_has_no_rights_and_a_home(as_user: User) -> None:
    told = as_user.run("sh", "-c", 'id -u; cd && touch here && echo "$HOME"').stdout.split()
    assert told == [str(as_user.uid), str(as_user.home)]
    assert as_user.uid != 0


def test_an_ordinary_user_can_import_capsule(as_user: User) -> None:
    ended = as_user.run(as_user.python, "-c", "import capsule.errors, msgspec")
    assert ended.returncode == 0, ended.stderr


def test_an_ordinary_user_cannot_read_the_shadow_file(as_user: User) -> None:
    assert as_user.run("cat", "/etc/shadow").returncode != 0


def test_a_missing_component_is_a_skip_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "IN_CI", False)
    with pytest.raises(pytest.skip.Exception, match="no dockerd"):
        support.component_missing("no dockerd")


def test_a_missing_component_is_a_failure_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "IN_CI", True)
    with pytest.raises(pytest.fail.Exception, match="no dockerd"):
        support.component_missing("no dockerd")
