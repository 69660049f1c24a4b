"""The server's two folders: where they are by default, and what `doctor` says of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capsule.cli import places
from capsule.config import Config, default_dirs
from capsule.config_checks import may_be
from tests.support.users import User

SCRIPT = """
import sys
from capsule.config import default_dirs, load_config
from capsule.cli import places
print(default_dirs({"HOME": sys.argv[1]})["data_dir"])
for found in places.look(load_config()):
    print(found.ok, found.name, found.detail, found.fix, sep="|")
"""


def as_somebody(user: User, home: str, **env: str) -> list[str]:
    said = user.run(user.python, "-c", SCRIPT, home, env=env)
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()


def test_who_cannot_make_a_folder_at_home_has_one_in_tmp(as_user: User) -> None:
    chosen = as_somebody(as_user, "/")[0]
    assert chosen == f"/tmp/capsule-home-{as_user.uid}"
    assert as_somebody(as_user, "/proc/nobody")[0] == chosen
    mine = as_somebody(as_user, str(as_user.home))[0]
    assert mine == f"{as_user.home}/.local/share/capsule"


def test_a_folder_that_is_there_stays_the_one_whoever_owns_it(tmp_path: Path) -> None:
    folder = tmp_path / "share" / "capsule"
    assert may_be(folder)
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    assert may_be(folder)
    assert default_dirs({"XDG_DATA_HOME": str(tmp_path / "share")}, 1000)["data_dir"] == folder


def test_what_cannot_be_written_is_named_with_its_setting(as_user: User) -> None:
    at = {"CAPSULE_DATA_DIR": "/proc/data", "CAPSULE_RUN_DIR": f"{as_user.home}/run/capsule"}
    data, run = as_somebody(as_user, "/", **at)[1:]
    assert data.startswith("False|data_dir|/proc/data cannot be made: /proc cannot be written")
    assert "CAPSULE_DATA_DIR" in data
    assert run == f"True|run_dir|{as_user.home}/run/capsule|"


def test_somebody_elses_folder_is_named(as_user: User) -> None:
    if as_user.uid == os.getuid():
        pytest.skip("there is nobody else")
    at = {"CAPSULE_DATA_DIR": "/var/tmp"}
    assert "belongs to uid 0" in as_somebody(as_user, "/", **at)[1]


def test_noexec_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*flags[:8], 8, flags[9])))
    config = Config(data_dir=tmp_path, run_dir=tmp_path)
    data, run = places.look(config)
    assert not data.ok and places.NOEXEC in data.detail and "CAPSULE_DATA_DIR" in data.fix
    assert run.ok
