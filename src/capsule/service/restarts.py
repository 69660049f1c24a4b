"""A sandbox whose programs have ended and whose files go on: in another box, as after a reboot."""

from __future__ import annotations

from dataclasses import replace

from capsule.providers.cleanup import to_the_end
from capsule.service.entry import Entry
from capsule.service.reset import Resets, Target
from capsule.service.snapshots import Snapshots


class Restarts:
    def __init__(self, snapshots: Snapshots, resets: Resets) -> None:
        self._snapshots = snapshots
        self._resets = resets

    async def restart(self, entry: Entry) -> None:
        """Its files are as they were at one moment; what a program wrote after that, as it was
        about to end, may be lost.

        Raises NotSupportedError, TooLargeError, NoSpaceError, CapacityError, UnavailableError: then
        it is as it was; and what keeps it from being used.
        """
        entry.running()
        async with self._snapshots.saved(entry) as (layers, _):
            # A step is told from the files of its own box; in the new one there is no such.
            steps = tuple(replace(each, box_id="", at=0.0) for each in entry.steps)
            # Whoever asked may leave; the layers are held until the box that begins from them is.
            await to_the_end(self._resets.reset(entry.id, Target(layers, steps)))
