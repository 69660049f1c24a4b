"""What E2B tells of a file or folder."""

from __future__ import annotations

import posixpath
import stat
from datetime import UTC, datetime
from typing import Any

from capsule.edge.e2b.guests import USER
from capsule.model import ROOT, Detail, FileStat

PREFIX = "user.e2b."  # of the attributes that are a file's metadata
DETAIL = Detail(attributes=PREFIX)

_TYPES = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_MODES = {"file": stat.S_IFREG, "dir": stat.S_IFDIR, "symlink": stat.S_IFLNK}
_NAMES = {"0": ROOT, "1000": USER}  # in images that name nobody


def entry(found: FileStat, path: str) -> dict[str, Any]:
    """Of what is at `path`, asked for with DETAIL. A link has the type and mode of what it leads
    to, if that is there. What is empty is left out, as in all of Connect's JSON."""
    behind = found.resolved or found
    told = {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get(behind.type, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": str(found.size),
        "mode": behind.mode & 0o777,
        "permissions": permissions(found),
        "owner": _NAMES.get(found.owner, found.owner),
        "group": _NAMES.get(found.group, found.group),
        "modifiedTime": _time(found.mtime_ns),
    }
    if found.type == "symlink":
        told |= {"symlinkTarget": _target(found, path), "isSymlink": True}
    if found.metadata:
        told["metadata"] = found.metadata
    return told


def _target(link: FileStat, path: str) -> str:
    """Where it ends; of one that leads nowhere, what it says."""
    if link.resolved is not None:
        return link.resolved.path
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link.target or ""))


def _time(ns: int) -> str:
    seconds, rest = divmod(ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def permissions(found: FileStat) -> str:
    """As Go writes them: with an L for links."""
    text = stat.filemode(_MODES.get(found.type, stat.S_IFREG) | found.mode)
    return "L" + text[1:] if found.type == "symlink" else text
