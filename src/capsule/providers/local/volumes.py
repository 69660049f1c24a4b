"""Volumes on this host: folders that boxes share and that outlive them.

data_dir/volumes/ID belongs to the user that programs are inside. One with a size is
data_dir/volumes/ID.disk instead: ID.img, a file system with one folder in it, and where each box's
keeper mounts it, for its own box to see. The host never looks into any of them; it makes them,
mounts them, and removes them by calls that follow nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from capsule.errors import InvalidError, NoSpaceError, NotFoundError
from capsule.providers.contract import VolumeLook
from capsule.providers.local import sized
from capsule.providers.local.disk import format_volume
from capsule.providers.local.folders import make_folder, new_folder
from capsule.providers.local.removal import remove_tree
from capsule.providers.local.settled import sync_entry

_SIZED = ".disk"
_TOP = "data"  # in the image, beside its lost+found


class Place(NamedTuple):
    """Where a box's keeper finds a volume; `image` is mounted at `point` first."""

    folder: Path
    image: Path | None = None
    point: Path | None = None


class Problem(NamedTuple):
    """What keeps a volume from what it promises."""

    why: str
    fix: str


class Volumes:
    """`owner`: None keeps whoever makes them. All of it blocks."""

    def __init__(self, folder: Path, *, owner: int | None, mkfs: Path | None = None) -> None:
        self.folder = folder
        self._owner = owner
        self._mkfs = mkfs

    def prepare(self) -> None:
        """What a killed server had begun to make or remove is removed."""
        make_folder(self.folder, 0o700)
        # Of a server before this one others could pass; in a volume there may be set-uid files.
        self.folder.chmod(0o700)
        for name in os.listdir(self.folder):
            if name.startswith("."):
                remove_tree(self.folder / name)

    def place(self, id: str) -> Place:
        """Raises NotFoundError."""
        sized = self._path(id + _SIZED)
        if sized.is_dir():
            return Place(sized / "mount" / _TOP, sized / f"{id}.img", sized / "mount")
        if not self._path(id).is_dir():
            raise NotFoundError(f"volume {id} is not on this host any more")
        return Place(self._path(id))

    def make(self, id: str, size: int | None = None) -> None:
        draft = self.folder / f".{id}"
        if size is None:
            self._make_folder(draft)
            os.rename(draft, self._path(id))
            sync_entry(self._path(id))
            return
        new_folder(draft, 0o711)
        try:
            new_folder(draft / "mount", 0o711)
            content = draft / "content"
            new_folder(content, 0o755)
            self._make_folder(content / _TOP)
            format_volume(self._mkfs, draft / f"{id}.img", size, content=content)
            remove_tree(content)
            sync_entry(draft / f"{id}.img")
            os.rename(draft, self._path(id + _SIZED))
            sync_entry(self._path(id + _SIZED))
        except BaseException:
            remove_tree(draft)
            raise

    def _make_folder(self, path: Path) -> None:
        new_folder(path, 0o755)
        if self._owner is not None:
            os.chown(path, self._owner, self._owner)

    def make_ready(self, id: str) -> Problem | None:
        """One with a size, before a box has it: what it lacks is mended, or told."""
        image = self.place(id).image
        if image is None:
            return None
        sized.repair(image)
        with suppress(NoSpaceError, OSError):  # an older server has made it, without room
            sized.reserve(image)
        return _problem(image, sized.look(image))

    def look(self, id: str) -> VolumeLook:
        image = self._path(id + _SIZED) / f"{id}.img"
        with suppress(FileNotFoundError):
            state = sized.look(image)
            problem = _problem(image, state)
            return VolumeLook(state.used, f"{problem.why}; {problem.fix}" if problem else None)
        return VolumeLook()

    def remove(self, id: str) -> None:
        draft = self.folder / f".{id}"
        for name in (id, id + _SIZED):
            with suppress(FileNotFoundError):
                os.rename(self._path(name), draft)
        with suppress(FileNotFoundError):  # there was never any
            remove_tree(draft)

    def ids(self) -> list[str]:
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(self.folder) if not name.startswith(".")]
            return [name.removesuffix(_SIZED) for name in names]
        return []

    def _path(self, name: str) -> Path:
        if not name.removesuffix(_SIZED).isalnum():
            raise InvalidError(f"not the id of a volume: {name[:80]!r}")
        return self.folder / name


def _problem(image: Path, state: sized.State) -> Problem | None:
    if state.damaged:
        return Problem(
            "its file system had an error: it may be read-only, and may have lost what was written "
            "just before",
            "delete all sandboxes that have it; the next one begins with a repair (e2fsck, of "
            "e2fsprogs)",
        )
    if missing := sized.unreserved(image):
        return Problem(
            f"{missing} bytes are not reserved on the disk of data_dir: when that is full, what is "
            "written is lost",
            "free some space there, or take a file system that can reserve it (ext4, XFS); the "
            "next sandbox that has the volume reserves it",
        )
    return None
