"""Directories of the server: private, and used by one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.errors import ConflictError, ForbiddenError, UnavailableError
from capsule.service.lock import DirectoryLock, make_private
from tests.support import ROOT


def test_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    first = DirectoryLock.acquire(tmp_path / "d")
    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        DirectoryLock.acquire(tmp_path / "d")
    DirectoryLock.acquire(tmp_path / "other").close()
    first.close()
    first.close()
    DirectoryLock.acquire(tmp_path / "d").close()


_HOLDER = """
import sys, time
from pathlib import Path
from capsule.service.lock import DirectoryLock
DirectoryLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_server_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConflictError, match=f"process {holder.pid}"):
            DirectoryLock.acquire(tmp_path)
        holder.kill()
    DirectoryLock.acquire(tmp_path).close()


def test_nobody_else_may_write_to_it(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("as_root")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(ForbiddenError, match="is not a directory of uid 0"):
        make_private(theirs)
