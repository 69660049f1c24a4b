"""Pause and resume: running ⇄ paused, and what a pause does to a sandbox's end.

The record says `paused` before the box stands still, and `running` after it moves again: a server
that is killed in between finds `paused`, and pauses the box once more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from capsule.errors import NotSupportedError, UnavailableError
from capsule.model import State
from capsule.providers.cleanup import finish
from capsule.providers.contract import Box, Pausable
from capsule.service.entry import Entry
from capsule.service.sandboxes import DESTROY_BUDGET, Parts, Sandboxes


class Pausing:
    def __init__(self, parts: Parts, sandboxes: Sandboxes) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._sandboxes = sandboxes
        self.restart: Callable[[Entry], Awaitable[None]]  # told by whoever can keep files alone

    async def pause(self, entry: Entry, *, memory: bool = True, hold: bool = False) -> None:
        """Returns when nothing in it moves. Paused already: fine. Without `memory` its programs
        are ended first; with `hold` its time stands still as well.

        Raises NotSupportedError, WrongStateError, GoneError, ConflictError (not all of its
        processes can be stopped just now), UnavailableError.
        """
        if not memory and not _paused(entry):
            entry.running()
            _pausable(entry)
            await self.restart(entry)
        async with entry.shifting:
            if _paused(entry):
                return
            entry.running()
            box = _pausable(entry)
            before = (entry.deadline, entry.expires)
            self._sandboxes.move(entry, State.PAUSED)
            entry.pause_kept, entry.held = "memory" if memory else "files", hold
            if hold or entry.on_timeout == "pause":
                self._set_end(entry, self._parts.config.paused_ttl)
            try:
                await self._sandboxes.keep(entry)
                await box.pause()
            except BaseException:
                if _paused(entry) and entry.ending is None:
                    entry.deadline, entry.expires = before
                    await finish(self._undo(entry, box), f"pause {entry.id}", budget=DESTROY_BUDGET)
                raise

    async def _undo(self, entry: Entry, box: Pausable) -> None:
        try:
            await box.resume()
        finally:
            if entry.state is State.PAUSED:
                self._sandboxes.move(entry, State.RUNNING)
                entry.pause_kept, entry.held = "", False
                await self._sandboxes.note(entry)

    async def resume(self, entry: Entry) -> None:
        """Returns when it runs. Running already: fine. One that would be paused at its timeout has
        its whole ttl again.

        Raises WrongStateError, GoneError, UnavailableError.
        """
        async with entry.shifting:
            if not _paused(entry):
                entry.running()
                return
            try:
                await _pausable(entry).resume()
            except UnavailableError:
                await self._look(entry)
                raise
            if not _paused(entry) or entry.ending is not None:
                raise entry.refusal()
            self._sandboxes.move(entry, State.RUNNING)
            entry.active = entry.checked = self._clock.monotonic()
            if entry.held or entry.on_timeout == "pause":
                self._set_end(entry, entry.ttl)
            entry.pause_kept, entry.held = "", False
            await self._sandboxes.note(entry)

    async def _look(self, entry: Entry) -> None:
        """Nobody asks a paused box whether it is alive: it may have died long ago."""
        box = await self._parts.providers[entry.provider].adopt(entry.box_handle())
        if box is None and entry.ending is None:
            await self._sandboxes.fail(entry, "its box died while it was paused")
            raise entry.refusal()

    def _set_end(self, entry: Entry, left: float) -> None:
        entry.deadline = self._clock.monotonic() + left
        entry.expires = self._clock.now() + left


def _paused(entry: Entry) -> bool:
    return entry.state is State.PAUSED


def _pausable(entry: Entry) -> Pausable:
    box: Box | None = entry.box
    if box is None:
        raise entry.refusal()
    if not isinstance(box, Pausable):
        raise NotSupportedError(
            f"provider {entry.provider} cannot pause a sandbox",
            hint="GET /v1/capabilities lists the features of each provider",
            sandbox_id=entry.id,
        )
    return box
