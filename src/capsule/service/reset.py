"""A sandbox back in its template's state: it gets another box, and keeps its id.

Nothing is cleaned. The old box goes with all that ran or was written in it; the new one is from
the pool, or launched as for a create. In this order, so that a failure or a killed server leaves
the sandbox with one box, old or new, and the other to the reaper:

    obtain the new box → record it → take it → end the old one → the call returns

The old one is ended when none of its programs runs any more; where that comes well before all of
it is removed (former.py), nobody waits for the rest but a delete.

Until it is taken, calls reach the old box, and are told that they were reset with it. One task per
reset, which goes on when its caller leaves and ends with its sandbox. A second reset waits for the
first and then does its own, as somebody may have used the sandbox between them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from capsule.errors import CapsuleError, UnavailableError
from capsule.model import Layer, Step
from capsule.providers.cleanup import to_the_end
from capsule.providers.contract import Box
from capsule.service.admission import new_id, spec_of
from capsule.service.beginning import begin
from capsule.service.entry import Entry, over
from capsule.service.former import Former
from capsule.service.pool import Obtained
from capsule.service.sandboxes import Parts, Sandboxes
from capsule.service.tasks import Tasks
from capsule.service.values import Sandbox


@dataclass(frozen=True, slots=True)
class Target:
    """What the new box begins from, and the steps that the sandbox has then."""

    layers: tuple[Layer, ...]
    steps: tuple[Step, ...]


class Resets:
    def __init__(self, parts: Parts, sandboxes: Sandboxes) -> None:
        self._store = parts.store
        self._clock = parts.clock
        self._sandboxes = sandboxes
        self._pool = sandboxes.pool
        self._tasks = Tasks()

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def reset(self, id: str, to: Target | None = None) -> Sandbox:
        """`to`: not how it began, but this. Raises NotFoundError, GoneError, WrongStateError;
        CapacityError, UnavailableError, NoSpaceError, whose message says whether it was reset."""
        entry = self._sandboxes.find(id)
        while entry.resetting is not None:
            await asyncio.wait({entry.resetting})
        if entry.ending is not None:
            raise over(entry.id, entry.reason)
        entry.running()
        resetting = self._tasks.spawn(
            self._reset(entry, to or _beginning(entry)), f"reset {entry.id}"
        )
        entry.resetting = resetting
        resetting.add_done_callback(lambda _: _reset_is_over(entry))  # also before it has begun
        await asyncio.wait({resetting})
        if resetting.cancelled():
            raise over(entry.id, entry.reason or "the server stopped")
        resetting.result()
        return entry.view()

    async def _reset(self, entry: Entry, to: Target) -> None:
        entry.using += 1  # it is not idle
        try:
            old = await self._exchange(entry, to)
            await asyncio.wait({old.ended})
            if not old.ended.result():
                raise UnavailableError(
                    f"sandbox {entry.id} was reset, but its old box is not removed yet",
                    hint="what ran in it may run on for a while; its removal is tried again",
                    sandbox_id=entry.id,
                )
        finally:
            entry.using -= 1
            entry.active = self._clock.monotonic()

    async def _exchange(self, entry: Entry, to: Target) -> Former:
        """Returns the box that is not its own any more."""
        try:
            spec = replace(spec_of(entry), layers=tuple(layer.id for layer in to.layers))
            got = await self._pool.obtain(entry.provider, spec, new_id())
        except CapsuleError as error:
            error.message = f"sandbox {entry.id} was not reset: {error.message}"
            raise
        try:
            async with entry.shifting:  # no pause of the one box ends up with the other
                if entry.ending is not None:
                    raise over(entry.id, entry.reason)
                entry.running()
                _check_walls(entry, got.box)
                await self._record(entry, got, to)
                old = self._take(entry, got, to)
        except BaseException:
            await to_the_end(self._pool.remove(got.box))
            raise
        await begin(entry)
        if got.context is not None:
            await self._sandboxes.inherit(entry, got.context)
        return old

    async def _record(self, entry: Entry, got: Obtained, to: Target) -> None:
        now = entry.record(self._sandboxes.boot)
        handle = got.box.handle
        await self._store.save(
            replace(
                now,
                box_id=handle.sandbox_id,
                handle=handle.data,
                started=got.started,
                layers=to.layers,
                steps=to.steps,
            )
        )
        await self._store.forget_sessions(entry.id)

    def _take(self, entry: Entry, got: Obtained, to: Target) -> Former:
        assert entry.box is not None  # it runs
        old = self._pool.part(entry.box, frozenset(layer.id for layer in entry.layers))
        self._sandboxes.part(entry, old)
        entry.take(got.box, got.started)
        entry.end()
        self._pool.hand_over(got.box)
        entry.layers, entry.steps = to.layers, to.steps
        entry.sessions = {}
        entry.learned = set()
        entry.checked = self._clock.monotonic()
        return old


def _reset_is_over(entry: Entry) -> None:
    entry.resetting = None


def _beginning(entry: Entry) -> Target:
    if not entry.steps:
        return Target(entry.layers, ())
    first = entry.steps[0]
    return Target(first.layers, (replace(first, box_id="", at=0.0),))


def _check_walls(entry: Entry, new: Box) -> None:
    """A host or a configuration may have changed since it was created."""
    if entry.isolation is not None and new.isolation.weaker_than(entry.isolation):
        raise UnavailableError(
            f"sandbox {entry.id} was not reset: new boxes are isolated by {new.isolation}, "
            f"its own by {entry.isolation}",
            hint="create another if that is strong enough",
            sandbox_id=entry.id,
        )
