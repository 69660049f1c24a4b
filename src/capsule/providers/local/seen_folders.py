"""Which folders layers had when their boxes told them: where, and which inodes.

A file whose own times say that it has not changed may yet be another one than the layer before has
at its path: a folder above it was renamed, which its times do not tell. It is the same if the
folder it is in is the same, at the same place. Only in memory: what is not known is saved as a
whole.
"""

from __future__ import annotations

import threading
from array import array

MOST = 8 * 1024 * 1024  # folders in all, of 8 bytes each


def place_of(path: bytes, inode: int, *, opaque: bool) -> int:
    return hash((path, inode, opaque))


class SeenFolders:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._count = 0
        self._of: dict[str, array[int]] = {}  # by layer, oldest first
        self._lock = threading.Lock()  # layers are removed in threads

    def note(
        self,
        layer: str,
        places: array[int],
        *,
        instead_of: str | None = None,
        also: bool = False,
    ) -> None:
        """`instead_of`: a layer that nobody will ask for again. `also`: it has its folders, too, or
        had them: a folder that is gone does no harm, as any that comes is told as a whole."""
        with self._lock:
            if instead_of is not None:
                if also and (earlier := self._of.get(instead_of)) is not None:
                    places = array("q", {*earlier, *places})
                self._drop_same(instead_of)
            self._drop(layer)
            self._of[layer] = places
            self._count += len(places)
            while self._count > self._most:
                self._drop(next(iter(self._of)))

    def note_same(self, layer: str, other: str) -> None:
        """It has the folders of another, if those are known. Who notes one instead of either has
        no use for both."""
        with self._lock:
            if other in self._of:
                self._drop(layer)
                self._of[layer] = self._of[other]
                self._count += len(self._of[other])

    def of(self, layer: str) -> frozenset[int] | None:
        """None: not known."""
        with self._lock:
            found = self._of.get(layer)
        return None if found is None else frozenset(found)

    def forget(self, layer: str) -> None:
        with self._lock:
            self._drop(layer)

    def _drop_same(self, layer: str) -> None:
        old = self._of.get(layer)
        for name in [name for name, each in self._of.items() if each is old]:
            self._drop(name)

    def _drop(self, layer: str) -> None:
        self._count -= len(self._of.pop(layer, ()))
