"""What the doctor finds of the server's user in folders that sandboxes see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capsule.providers.local import exposed_files
from capsule.providers.local.exposed_files import find

ME, OTHER = os.geteuid(), os.geteuid() + 1
GROUPS = {os.getegid()}


@pytest.fixture
def usr(tmp_path: Path) -> Path:
    app = tmp_path / "src" / "app"
    (app / "keys").mkdir(parents=True)
    for name, mode in (("main.py", 0o644), (".env", 0o600), ("group", 0o640), ("gone", 0o000)):
        (app / name).write_text("x")
        (app / name).chmod(mode)
    (app / "keys" / "deep").write_text("x")
    (app / "keys").chmod(0o700)
    (app / "link").symlink_to(".env")
    return tmp_path


def test_finds_what_others_may_not_read(usr: Path) -> None:
    found = find([str(usr)], ME, GROUPS)
    assert found.whole and found.count == 3, "a folder counts as one"
    assert {Path(path).name for path in found.first} == {".env", "group", "keys"}


def test_files_of_others_count_by_group_alone(usr: Path) -> None:
    found = find([str(usr)], OTHER, GROUPS)
    assert [Path(path).name for path in found.first] == ["group"]
    assert find([str(usr)], OTHER, ()).count == 0


def test_says_so_when_time_ran_out(usr: Path) -> None:
    assert not find([str(usr)], ME, GROUPS, seconds=0).whole


def test_the_doctor_names_the_first(usr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposed_files, "FOLDERS", (str(usr),))
    monkeypatch.setattr(exposed_files, "SHOWN", 1)
    told = exposed_files.finding(ME, GROUPS)
    assert not told.ok and told.detail.startswith("3 ") and told.detail.endswith(", …")
    assert str(usr) in told.detail and told.fix
    assert exposed_files.finding(OTHER, ()).ok
