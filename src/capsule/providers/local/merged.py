"""Look up paths in layers as overlayfs would merge them, without mounting and without trust.

Links are resolved here, by their text, inside the image; the kernel is never asked to follow one,
since for it `/` would be the host's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from capsule.providers.local.unpack import is_deleted, is_opaque

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40  # as the kernel


class _Found(NamedTuple):
    mode: int
    target: str  # of a link


def find_programs(layers: Sequence[Path], names: Iterable[str], path: str) -> frozenset[str]:
    """Which of `names` are programs in one of the folders of `path`; layers have the top first."""
    places = [place for place in path.split(":") if place]
    return frozenset(
        name for name in names if any(_is_program(layers, f"{place}/{name}") for place in places)
    )


def _is_program(layers: Sequence[Path], path: str) -> bool:
    mode = resolved_mode(layers, path)
    return mode is not None and stat.S_ISREG(mode) and bool(mode & 0o111)


def resolved_mode(layers: Sequence[Path], path: str) -> int | None:
    """The mode of what `path` leads to inside the image; None: to nothing."""
    todo = path.split("/")[::-1]
    at: list[str] = []
    mode, links = stat.S_IFDIR, 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del at[-1:]
            continue
        found = _look_up(layers, [*at, part])
        if found is None:
            return None
        if stat.S_ISLNK(found.mode):
            links += 1
            if links > _MOST_LINKS:
                return None
            if found.target.startswith("/"):
                at = []
            todo.extend(found.target.split("/")[::-1])
        else:
            mode = found.mode
            at.append(part)
    return mode


def _look_up(layers: Sequence[Path], parts: list[str]) -> _Found | None:
    for layer in layers:
        found, hides_lower = _look_in(layer, parts)
        if found is not None or hides_lower:
            return found
    return None


def _look_in(layer: Path, parts: list[str]) -> tuple[_Found | None, bool]:
    """What one layer has there, and whether the layers below count no more."""
    fd = os.open(layer, _DIR)
    opaque = False
    try:
        for part in parts[:-1]:
            inner = os.open(part, _DIR, dir_fd=fd)
            os.close(fd)
            fd = inner
            opaque = opaque or is_opaque(fd)
        info = os.stat(parts[-1], dir_fd=fd, follow_symlinks=False)
        if is_deleted(info):
            return None, True
        target = os.readlink(parts[-1], dir_fd=fd) if stat.S_ISLNK(info.st_mode) else ""
        return _Found(info.st_mode, target), True
    except FileNotFoundError:
        return None, opaque
    except OSError:  # a parent is deleted, or replaced by a file
        return None, True
    finally:
        os.close(fd)
