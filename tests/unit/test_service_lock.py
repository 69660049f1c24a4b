"""Directories of the server: private, and used by one at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capsule.errors import ConflictError, ForbiddenError, UnavailableError
from capsule.service.lock import DirectoryLock, make_private


def test_the_second_learns_who_the_first_is(tmp_path: Path) -> None:
    first = DirectoryLock.acquire(tmp_path / "d")
    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        DirectoryLock.acquire(tmp_path / "d")
    DirectoryLock.acquire(tmp_path / "other").close()
    first.close()
    first.close()
    DirectoryLock.acquire(tmp_path / "d").close()


def test_no_other_user_may_write_to_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    make_private(shared)
    assert shared.stat().st_mode & 0o022 == 0
    make_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o022 == 0


def test_links_and_what_is_somebody_elses_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    with pytest.raises(ForbiddenError, match="is not a directory of uid"):
        make_private(tmp_path / "link")
    with pytest.raises(UnavailableError, match="cannot make"):
        make_private(tmp_path / "file")
