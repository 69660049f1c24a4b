"""Which boxes may watch their folders from one step to the next.

Each that does takes an inotify instance. A user of the host has 128 of them, usually, for all his
programs; where boxes are of the same user, half of them are left to others, in boxes and outside.
A box that may not watch looks at every file when a step is taken. One that may does so for as long
as it lives, also for another server: its record says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from capsule.providers.cleanup import to_the_end
from capsule.providers.local import records

INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
USUAL = 128


class Watchers:
    def __init__(self, folder: Path, *, shared: bool) -> None:
        """`folder`: the boxes'. `shared`: else each box is a user of its own."""
        self._folder = folder
        self._shared = shared
        self.most: int | None = None
        self._boxes: set[str] = set()

    def prepare(self, boxes: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Blocks. `boxes`: those of an earlier server, and their records."""
        self.most = half_of_a_users() if self._shared else None
        self._boxes = {name for name, record in boxes if record.get("watches")}

    async def admit(self, box: str) -> bool:
        """Until it is released."""
        if self.most is None or box in self._boxes:
            return True
        if len(self._boxes) >= self.most:
            return False
        self._boxes.add(box)
        amended = asyncio.to_thread(records.amend, self._folder / box, {"watches": True})
        await to_the_end(amended)  # whoever leaves meanwhile has asked for it all the same
        return True

    def release(self, box: str) -> None:
        self._boxes.discard(box)


def half_of_a_users() -> int:
    try:
        return int(INSTANCES.read_text()) // 2
    except (OSError, ValueError):
        return USUAL // 2
