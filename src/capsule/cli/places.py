"""The server's two folders: whether it can make them, write to them, and run what is in them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from capsule import surroundings
from capsule.config import Config
from capsule.config_checks import may_be, nearest
from capsule.errors import UnavailableError
from capsule.host_errors import other_folders
from capsule.providers.contract import Finding

NOEXEC = "mounted noexec"


def look(config: Config) -> Iterable[Finding]:
    for name in ("data_dir", "run_dir"):
        path: Path = getattr(config, name)
        if problem := _closed(path):
            yield Finding(name, False, problem, other_folders())
        elif name == "data_dir" and os.statvfs(nearest(path)).f_flag & os.ST_NOEXEC:
            detail = f"{path}: {NOEXEC}: at landlock, what programs write cannot be executed"
            yield Finding(name, False, detail, _executable())
        else:
            yield Finding(name, True, str(path))


def _closed(path: Path) -> str:
    if not os.path.lexists(path):
        return "" if may_be(path) else f"{path} cannot be made: {nearest(path)} cannot be written"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"{path} cannot be written"
    mine = path.stat().st_uid == os.geteuid()
    return "" if mine else f"{path} belongs to uid {path.stat().st_uid}: take a folder below it"


def _executable() -> str:
    where = "set CAPSULE_DATA_DIR to a folder that is not"
    if surroundings.find().kind in (surroundings.Kind.DOCKER, surroundings.Kind.PODMAN):
        return f"--tmpfs /tmp:exec, or {where}, for instance on a volume"
    return where


@contextmanager
def scratch(config: Config) -> Iterator[Path]:
    """A folder for files of the moment. Raises UnavailableError where nothing can be written."""
    spare = [str(nearest(path)) for path in (config.run_dir, config.data_dir)]
    for place in (None, *spare):
        try:
            folder = tempfile.TemporaryDirectory(prefix="capsule-", dir=place)
            break
        except OSError:
            continue
    else:
        raise UnavailableError("no folder can be written, /tmp neither", hint=other_folders())
    with folder as home:
        os.chmod(home, 0o711)  # programs of sandboxes are other users
        yield Path(home)
