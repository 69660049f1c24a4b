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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


class Full(NamedTuple):
    """Of `among` one must go, if one can."""

    among: list[Entry]
    limit: int
    text: str


class VolumeFiles:
    """Owns a task for each sandbox that is being created."""

    def __init__(self, parts: Parts, sandboxes: Sandboxes, access: Access) -> None:
        self._parts = parts
        self._sandboxes = sandboxes
        self._access = access
        self._opening: dict[str, asyncio.Task[SandboxId]] = {}  # by the volume's id
        self._waiting: Counter[str] = Counter()  # for a sandbox, by the volume's id
        self._tasks = Tasks()

    async def aclose(self) -> None:
        await self._tasks.aclose()

    @asynccontextmanager
    async def open(self, volume: Volume) -> AsyncIterator[Look]:
        """Until it is left nobody else's volume takes its place. Raises NotFoundError (it was
        deleted), CapacityError, UnavailableError.
        """
        entry = await self._ready(volume)
        entry.using += 1
        try:
            yield Look(Files(self._access, entry, self._parts.room), POINT)
        finally:
            entry.using -= 1
            self._access.touch(entry)

    async def _ready(self, volume: Volume) -> Entry:
        self._waiting[volume.id] += 1
        try:
            while (entry := self._serving(volume)) is None:
                await self._open(volume)
            return entry
        finally:
            self._waiting[volume.id] -= 1
            self._waiting += Counter()  # forgets those that nobody waits for

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
        while (full := self._full(tenant)) is not None:
            if not await self._give_way(full):
                return

    def _full(self, tenant: str) -> Full | None:
        """None: there is room."""
        known = self._aside()
        own = [entry for entry in known if entry.notes.get(_OWNER) == tenant]
        if len(own) >= EACH:
            return Full(own, EACH, "of yours are being read or written at once")
        if len(known) >= MOST:
            return Full(known, MOST, "are being read or written at once")
        return None

    async def _give_way(self, full: Full) -> bool:
        """One of whoever has the most; of those, the one that was not used for the longest. False:
        it could not be ended now, and the reaper tries again.
        """
        among, limit, text = full
        free = [entry for entry in among if self._is_free(entry)]
        if not free:
            raise CapacityError(
                f"{len(among)} volumes {text}, limit {limit}",
                retry_after=1.0,
                hint="try again in a moment, or mount the volume in a sandbox",
                limit=limit,
            )
        held = Counter(entry.notes.get(_OWNER) for entry in among)
        oldest = min(free, key=lambda entry: (-held[entry.notes.get(_OWNER)], entry.active))
        try:
            await self._sandboxes.end(oldest, "another volume is needed")
        except CapsuleError:
            return False
        return True

    def _is_free(self, entry: Entry) -> bool:
        if entry.state is State.CREATING or entry.volumes[0].id in self._waiting:
            return False
        return entry.using == 0

    def _serving(self, volume: Volume) -> Entry | None:
        for entry in self._aside():
            if entry.volumes[0].id == volume.id and entry.state is State.RUNNING and entry.link:
                return entry
        return None

    def _aside(self) -> list[Entry]:
        entries = self._sandboxes.entries.values()
        return [e for e in entries if e.tenant == ASIDE and e.volumes and e.ending is None]
