"""`capsule cp`: files and folders into a sandbox and out of it, as `cp -r` would place them."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import NamedTuple

from capsule.cli import show
from capsule.cli.remote import Server
from capsule.errors import InvalidError, NotFoundError
from capsule_sdk import Capsule, Transfer
from capsule_sdk import NotFoundError as RemoteNotFound

# One letter before the colon would be a drive; a path before it starts with . or /.
_REMOTE = re.compile(r"(?P<id>[A-Za-z0-9_-]{2,64}):(?P<path>.*)", re.DOTALL)
_STDIO = Path("-")


class Remote(NamedTuple):
    id: str
    path: str


def parse_place(text: str) -> Remote | Path:
    """`ID:/path` is in a sandbox; a local name with a colon is written ./like:this."""
    if found := _REMOTE.fullmatch(text):
        return Remote(found["id"], found["path"] or "/workspace")
    return Path(text)


def copy(server: Server, source_text: str, target_text: str, *, as_json: bool) -> int:
    source, target = parse_place(source_text), parse_place(target_text)
    if as_json and target == _STDIO:
        raise InvalidError("--json and - would both write to standard output")
    with server.client() as client:
        match source, target:
            case Path(), Remote():
                moved = _upload(client.get(target.id), source, target.path)
            case Remote(), Path():
                moved = _download(client.get(source.id), source.path, target)
            case _:
                raise InvalidError(
                    "one of the two must be in a sandbox, the other here",
                    hint="write the sandbox's side as ID:/path",
                )
    if as_json:
        show.as_json({"files": moved.files, "bytes": moved.bytes, "skipped": list(moved.skipped)})
        return 0
    for reason in moved.skipped:
        show.problem(f"left out {reason}", hint=None, code="skipped")
    if target == _STDIO:
        return 0
    show.note(f"copied {moved.files} file{'s' * (moved.files != 1)}, {show.size(moved.bytes)}")
    return 0


def _upload(capsule: Capsule, source: Path, path: str) -> Transfer:
    if source == _STDIO:
        written = capsule.write_file(path, sys.stdin.buffer)
        return Transfer(1, written.size)
    if not source.exists():
        raise NotFoundError(f"no such file: {source}", hint="check the path")
    # As with cp: into a folder that is there, or under the name that was given.
    if path.endswith("/") or _is_folder(capsule, path):
        path = posixpath.join(path, source.resolve().name)
    with show.progress(source.name, _total(source)) as step:
        return capsule.upload(source, path, progress=step)


def _is_folder(capsule: Capsule, path: str) -> bool:
    try:
        return capsule.stat(path, follow=True).is_dir
    except RemoteNotFound:
        return False


def _download(capsule: Capsule, path: str, target: Path) -> Transfer:
    if target == _STDIO:
        return _print(capsule, path)
    info = capsule.stat(path, follow=True)
    if target.is_dir() or str(target).endswith("/"):
        target = target / (posixpath.basename(path.rstrip("/")) or "root")
    if not target.parent.is_dir():
        raise NotFoundError(f"no such folder: {target.parent}", hint="make it first")
    total = None if info.is_dir else info.size
    with show.progress(posixpath.basename(path.rstrip("/")), total) as step:
        return capsule.download(path, target, progress=step)


def _print(capsule: Capsule, path: str) -> Transfer:
    size = 0
    for chunk in capsule.read_stream(path):
        size += sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()
    return Transfer(1, size)


def _total(source: Path) -> int:
    if source.is_file():
        return source.stat().st_size
    sizes = (
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(source)
        for name in names
    )
    return sum(sizes)
