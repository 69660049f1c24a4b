"""The upper layers of a stack as one, which shows over the others what they show together.

What is no folder is the same as in the topmost layer that has it, under a further name (a hard
link): nothing is read or copied. Folders are made anew, of their parts in all layers down to one
that hides those below, as overlayfs would; a deletion, or that a folder hides what is below, is
only kept where the layers below have something of that name. It must not be anywhere else: in a
folder that no other layer has, overlayfs lists deletions as files.

The cost is that of the layers merged: of those below only such names are looked at as these have.
Nothing is mounted, no link is followed, and of all folders that are read one is open at a time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from capsule.providers.local.layer_diff import Folder, Names, Parts, Stack, opened
from capsule.providers.local.layer_folder import LayerFolder
from capsule.providers.local.unpack import is_deleted, is_opaque


class _Place(NamedTuple):
    """A folder that is still to be merged."""

    at: Names
    layers: Stack  # of those that are merged, the ones that have it, topmost first
    below: Stack  # of the others, the ones that would show through it
    hides: bool  # but must not


def merge(layers: Sequence[Path], below: Sequence[Path], into: LayerFolder) -> None:
    """Blocks. `below`: what the new layer will lie on; both topmost first.

    Raises InvalidError (a file has as many names as it may), TooLargeError, OSError; then it is
    half written.
    """
    todo = [_Place((), tuple(layers), tuple(below), hides=False)]
    while todo:
        # A folder is written whole before the one beside it.
        todo += _merge_folder(todo.pop(), into)


def _merge_folder(place: _Place, into: LayerFolder) -> list[_Place]:
    """All of a folder but the folders in it."""
    inner: list[_Place] = []
    with opened(place.layers, place.at) as parts, opened(place.below, place.at) as under:
        path = b"/".join(place.at)
        shown, opaque = _shown(parts)
        hides = place.hides or opaque
        if path:
            info = os.fstat(parts[0][1])
            mode = stat.S_IMODE(info.st_mode)
            into.folder(path, mode, info.st_mtime_ns, opaque=hides and bool(under))
        through = Folder(() if hides else _shown(under)[0])
        for name, found in _names(shown).items():
            if found.folders:
                at, below = (*place.at, name), through.inside(name)
                inner.append(_Place(at, tuple(found.folders), below, found.hides))
            elif not found.deleted or through.find(name) is not None:
                into.take(path + b"/" + name if path else name, found.where)
    return inner


def _shown(parts: Parts) -> tuple[Parts, bool]:
    """A folder's parts down to the first that hides those below; whether there is one."""
    for count, (_, fd) in enumerate(parts, 1):
        if is_opaque(fd):
            return parts[:count], True
    return parts, False


@dataclass(slots=True)
class _Name:
    """What layers have under one name."""

    where: int  # an open folder that has the topmost of it
    deleted: bool = False
    folders: list[Path] = field(default_factory=list)  # the layers in which it is one
    hides: bool = False  # below these folders it is something else


def _names(parts: Parts) -> dict[bytes, _Name]:
    found: dict[bytes, _Name] = {}
    for layer, fd in parts:
        with os.scandir(fd) as entries:
            for entry in entries:
                name, folder = os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)
                known = found.get(name)
                if known is None:
                    found[name] = _Name(fd, is_deleted(entry), [layer] if folder else [])
                elif known.folders and not known.hides:
                    if folder:
                        known.folders.append(layer)
                    else:
                        known.hides = True
    return found
