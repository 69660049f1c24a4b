"""Volumes on this host: folders that boxes share and that outlive them.

data_dir/volumes/ID belongs to the user that programs are inside. The host never looks into one; it
makes the folder, mounts it, and removes it by calls that follow nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from capsule.errors import InvalidError, NotFoundError
from capsule.providers.local.removal import remove_tree


class Volumes:
    """`owner`: None keeps whoever makes them. All of it blocks."""

    def __init__(self, folder: Path, *, owner: int | None) -> None:
        self._folder = folder
        self._owner = owner

    def prepare(self) -> None:
        """What a killed server had begun to make or remove is removed."""
        self._folder.mkdir(mode=0o711, exist_ok=True)
        for name in os.listdir(self._folder):
            if name.startswith("."):
                remove_tree(self._folder / name)

    def path(self, id: str) -> Path:
        """Raises NotFoundError."""
        path = self._path(id)
        if not path.is_dir():
            raise NotFoundError(f"volume {id} is not on this host any more")
        return path

    def make(self, id: str) -> None:
        draft = self._folder / f".{id}"
        os.mkdir(draft, 0o755)
        if self._owner is not None:
            os.chown(draft, self._owner, self._owner)
        os.rename(draft, self._path(id))

    def remove(self, id: str) -> None:
        draft = self._folder / f".{id}"
        with suppress(FileNotFoundError):
            os.rename(self._path(id), draft)
        remove_tree(draft)

    def ids(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(self._folder) if not name.startswith(".")]
        return []

    def _path(self, id: str) -> Path:
        if not id.isalnum():
            raise InvalidError(f"not the id of a volume: {id[:80]!r}")
        return self._folder / id
