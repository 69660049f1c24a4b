"""Files that the server's user keeps from others in folders that sandboxes see.

Where programs have that user's uid they may read them: `/usr/src/app` is a usual place for an
application with its secrets. The mode of a file says nothing between two processes of one user, and
to hide what is there at the start would not hide what is written later: so the doctor tells.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from capsule.providers.contract import Finding
from capsule.providers.local.skeleton import SYSTEM_DIRS

NAME = "private files"
FOLDERS = tuple(f"/{name}" for name in ("usr", *SYSTEM_DIRS))
SHOWN = 3
SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Exposed:
    first: tuple[str, ...]
    count: int
    whole: bool  # all was looked at in time


def find(
    folders: Iterable[str], uid: int, gids: Collection[int], *, seconds: float = SECONDS
) -> Exposed:
    """A folder counts as one, with all that is in it. Those less deep come first. Blocks."""
    deadline = time.monotonic() + seconds
    waiting = deque(folder for folder in folders if not os.path.islink(folder))
    first: list[str] = []
    count = 0
    while waiting and time.monotonic() < deadline:
        try:
            with os.scandir(waiting.popleft()) as entries:
                for entry in entries:
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if _is_private(found, uid, gids):
                        count += 1
                        first += [entry.path] if len(first) < SHOWN else []
                    elif stat.S_ISDIR(found.st_mode):
                        waiting.append(entry.path)
        except OSError:
            continue
    return Exposed(tuple(first), count, not waiting)


def _is_private(found: os.stat_result, uid: int, gids: Collection[int]) -> bool:
    """Whether the user may read (or enter) it, and others may not."""
    need = 0o1 if stat.S_ISDIR(found.st_mode) else 0o4
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
        return False
    if found.st_mode & need:
        return False
    if found.st_uid == uid:
        return bool(found.st_mode & need << 6)
    return found.st_gid in gids and bool(found.st_mode & need << 3)


def finding(uid: int, gids: Collection[int]) -> Finding:
    exposed = find(FOLDERS, uid, gids)
    rest = "" if exposed.whole else f" (looked for {SECONDS:g} seconds, not everywhere)"
    if not exposed.count:
        return Finding(NAME, True, f"none of the server's user below /usr{rest}")
    names = ", ".join(exposed.first) + (", …" if exposed.count > len(exposed.first) else "")
    return Finding(
        NAME,
        False,
        f"{exposed.count} below /usr that only the server's user may read, "
        f"and programs in sandboxes, who share its uid{rest}: {names}",
        "move them out of /usr, or run the server as another user or as root",
    )
