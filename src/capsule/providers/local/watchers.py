"""Which boxes may watch their folders from one step to the next.

Each that does takes an inotify instance. A user of the host has 128 of them, usually, for all his
programs; where boxes are of the same user, half of them are left to others, in boxes and outside.
A box that may not watch looks at every file when a step is taken.
"""

from __future__ import annotations

from pathlib import Path

INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
USUAL = 128


class Watchers:
    def __init__(self, *, shared: bool) -> None:
        """`shared`: else each box is a user of its own."""
        self._shared = shared
        self.most: int | None = None
        self._boxes: set[str] = set()

    def prepare(self) -> None:
        """Blocks."""
        self.most = half_of_a_users() if self._shared else None

    def admit(self, box: str) -> bool:
        """Until it is released."""
        if self.most is not None and box not in self._boxes and len(self._boxes) >= self.most:
            return False
        self._boxes.add(box)
        return True

    def release(self, box: str) -> None:
        self._boxes.discard(box)


def half_of_a_users() -> int:
    try:
        return int(INSTANCES.read_text()) // 2
    except (OSError, ValueError):
        return USUAL // 2
