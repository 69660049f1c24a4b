"""Directories of the server are private."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.errors import ForbiddenError, UnavailableError
from capsule.service.lock import make_private


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
