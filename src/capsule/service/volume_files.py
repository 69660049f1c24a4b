"""The files of volumes, for those who have no sandbox that mounts them.

The server looks into no volume: programs have written there. A small sandbox that has nothing but
the volume is created when somebody asks, used for whatever comes in the next seconds, and ended by
the reaper as any that nobody uses. It is nobody's (`caller.ASIDE`): no tenant sees it, and it
counts for none. A tenant has at most `EACH` of them, and those who have more than others give way
first: so nobody waits for somebody else's volumes while there is room.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

from capsule.errors import CapacityError, CapsuleError
from capsule.model import WORKSPACE, SandboxId, State, VolumeMount
from capsule.service.access import Access
from capsule.service.caller import ASIDE
from capsule.service.entry import Entry
from capsule.service.files import Files
from capsule.service.sandboxes import Parts, Sandboxes
from capsule.service.tasks import Tasks, outcome
from capsule.service.values import CreateRequest, Volume

IDLE = 10.0  # seconds
MOST = 64  # at once
EACH = 8  # of them, of one tenant
_OWNER = "volume_tenant"  # in the notes of such a sandbox
POINT = f"{WORKSPACE}/volume"


class Look(NamedTuple):
    """The files of a volume are below `root`."""

    files: Files
    root: str


class VolumeFiles:
    """Owns a task for each sandbox that is being created."""

    def __init__(self, parts: Parts, sandboxes: Sandboxes, access: Access) -> None:
        self._parts = parts
        self._sandboxes = sandboxes
        self._access = access
        self._opening: dict[str, asyncio.Task[SandboxId]] = {}  # by the volume's id
        self._tasks = Tasks()

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def open(self, volume: Volume) -> Look:
        """For the next seconds. Raises NotFoundError (it was deleted), CapacityError,
        UnavailableError.
        """
        entry = self._serving(volume)
        while entry is None:
            await self._open(volume)
            entry = self._serving(volume)
        self._access.touch(entry)
        return Look(Files(self._access, entry, self._parts.room), POINT)

    async def let_go(self, volume: Volume) -> None:
        """Before it is removed, whoever still reads or writes. Raises UnavailableError."""
        if (opening := self._opening.get(volume.id)) is not None:
            await asyncio.wait({opening})
        for entry in self._aside():
            if entry.volumes[0].id == volume.id:
                await self._sandboxes.end(entry, "its volume is deleted")

    async def _open(self, volume: Volume) -> None:
        """Whoever comes meanwhile waits for the same."""
        opening = self._opening.get(volume.id)
        if opening is None:
            opening = self._tasks.spawn(self._create(volume), f"look into volume {volume.id}")
            self._opening[volume.id] = opening
            opening.add_done_callback(lambda _: self._opening.pop(volume.id, None))
        await outcome(opening)

    async def _create(self, volume: Volume) -> SandboxId:
        await self._make_room(volume.tenant)
        request = CreateRequest(
            provider=volume.provider,
            ttl=self._parts.config.max_ttl,
            idle_timeout=IDLE,
            notes={_OWNER: volume.tenant},
        )
        mount = VolumeMount(volume.id, POINT, False, volume.name)
        made = await self._sandboxes.create(request, tenant=ASIDE, volumes=(mount,))
        return made.id

    async def _make_room(self, tenant: str) -> None:
        """Whoever comes meanwhile may take it: then once more. Raises CapacityError."""
        while (too_many := self._too_many(tenant)) is not None:
            if not await self._give_way(*too_many):
                return

    def _too_many(self, tenant: str) -> tuple[list[Entry], str] | None:
        """Of whom one must go, and why. None: there is room."""
        known = self._aside()
        own = [entry for entry in known if entry.notes.get(_OWNER) == tenant]
        if len(own) >= EACH:
            return own, f"of yours are being read or written at once, limit {EACH}"
        if len(known) >= MOST:
            return known, f"are being read or written at once, limit {MOST}"
        return None

    async def _give_way(self, among: list[Entry], limit: str) -> bool:
        """One of whoever has the most; of those, the one that was not used for the longest. False:
        it could not be ended now, and the reaper tries again.
        """
        free = [entry for entry in among if entry.using == 0]
        if not free:
            raise CapacityError(
                f"{len(among)} volumes {limit}",
                retry_after=1.0,
                hint="try again in a moment, or mount the volume in a sandbox",
            )
        held = Counter(entry.notes.get(_OWNER) for entry in among)
        oldest = min(free, key=lambda entry: (-held[entry.notes.get(_OWNER)], entry.active))
        try:
            await self._sandboxes.end(oldest, "another volume is needed")
        except CapsuleError:
            return False
        return True

    def _serving(self, volume: Volume) -> Entry | None:
        for entry in self._aside():
            if entry.volumes[0].id == volume.id and entry.state is State.RUNNING and entry.link:
                return entry
        return None

    def _aside(self) -> list[Entry]:
        entries = self._sandboxes.entries.values()
        return [e for e in entries if e.tenant == ASIDE and e.volumes and e.ending is None]
