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
    def __init__(self, most: int | None) -> None:
        """None: as many as there are boxes, each of which is a user of its own."""
        self._most = most
        self._boxes: set[str] = set()

    def admit(self, box: str) -> bool:
        """Until it is released."""
        if self._most is not None and box not in self._boxes and len(self._boxes) >= self._most:
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
