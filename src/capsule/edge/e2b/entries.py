"""What E2B tells of a file or folder."""

from __future__ import annotations

import posixpath
import stat
from datetime import UTC, datetime
from typing import Any

from capsule.edge.e2b.guests import USER
from capsule.model import ROOT, FileStat
from capsule.service.files import Files

_TYPES = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_MODES = {"file": stat.S_IFREG, "dir": stat.S_IFDIR, "symlink": stat.S_IFLNK}
_NAMES = {0: ROOT, 1000: USER}


async def entry(files: Files, found: FileStat, path: str) -> dict[str, Any]:
    """Of what is at `path`. A link is told as what it leads to, if that is there."""
    behind = found
    if found.type == "symlink":
        behind = await _behind(files, found, path)
    told = {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get(behind.type, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": str(found.size),
        "mode": behind.mode,
        "permissions": permissions(found),
        "owner": _NAMES.get(found.uid, str(found.uid)),
        "group": _NAMES.get(found.gid, str(found.gid)),
        "modifiedTime": datetime.fromtimestamp(found.mtime, UTC).isoformat(),
    }
    if found.type == "symlink":
        target = posixpath.join(posixpath.dirname(path), found.target or "")
        told |= {"symlinkTarget": posixpath.normpath(target), "isSymlink": True}
    return told


async def _behind(files: Files, link: FileStat, path: str) -> FileStat:
    from capsule.errors import CapsuleError

    try:
        return await files.stat(path, follow=True)
    except CapsuleError:
        return link


def permissions(found: FileStat) -> str:
    """As Go writes them: with an L for links."""
    text = stat.filemode(_MODES.get(found.type, stat.S_IFREG) | found.mode)
    return "L" + text[1:] if found.type == "symlink" else text
