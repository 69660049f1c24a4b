"""Is the box alive? Asked by the reaper in turn, and at once when an operation loses its agent.

A box is dead when its agent does not answer and its provider says that it is gone. The second
question keeps a trouble of our own (no file descriptors left, an engine that restarts) from
costing somebody a sandbox. An agent that is there and silent gets `SILENCE` seconds: a busy
machine may keep it waiting. Whoever cannot be asked about any box costs nobody anything.
"""

from __future__ import annotations

import asyncio
import errno
import heapq

import structlog

from capsule.errors import CapsuleError, GoneError, UnavailableError, WrongStateError
from capsule.link.link import AgentLink
from capsule.model import State
from capsule.providers.contract import OutOfReachError
from capsule.service.entry import Entry, over
from capsule.service.sandboxes import Parts, Sandboxes

log = structlog.get_logger(__name__)

PERIOD = 2.5  # how often each box is asked; an operation that worked counts as an answer
A_ROUND = 50  # boxes asked in one, at most: a thousand idle ones must not slow the others down
BUDGET = 3.0
ADOPT_BUDGET = 8.0  # more than a provider needs to find out that nobody answers it
SILENCE = 30.0
AT_ONCE = 32

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})


class Pulse:
    def __init__(self, parts: Parts, sandboxes: Sandboxes) -> None:
        self._providers = parts.providers
        self._clock = parts.clock
        self._sandboxes = sandboxes

    async def round(self) -> None:
        """Ask the boxes that have not answered for longest."""
        due = self._clock.monotonic() - PERIOD
        late = (e for e in self._sandboxes.entries.values() if e.checked <= due and _usable(e))
        found = heapq.nsmallest(A_ROUND, late, key=lambda entry: entry.checked)
        waiting = iter(found)

        async def work() -> None:
            for entry in waiting:
                await self.check(entry)

        async with asyncio.TaskGroup() as group:
            for _ in found[:AT_ONCE]:
                group.create_task(work())

    async def check(self, entry: Entry) -> UnavailableError | None:
        """On return the entry has answered, or failed, or is given more time. Returns what keeps
        its provider from saying which."""
        asked = entry.box_id
        if not _usable(entry) or await self._answers(entry):
            return None
        try:
            async with asyncio.timeout(ADOPT_BUDGET):
                box = await self._providers[entry.provider].adopt(entry.box_handle())
        except (CapsuleError, OSError, TimeoutError) as error:
            log.info("cannot tell whether a box lives", sandbox=entry.id, reason=str(error))
            if isinstance(error, OutOfReachError):
                entry.checked = self._clock.monotonic()  # nobody could ask: that is not its silence
                return error
            await self._silent(entry)
            return None
        if not _usable(entry) or entry.box_id != asked:
            return None  # it was reset meanwhile, and has another box
        if box is None:
            await self._sandboxes.fail(entry, "its box is gone: it was ended from outside, or died")
        elif entry.box is None:
            entry.take(box)  # the first time since the restart that its provider could say
        elif not await self._answers(entry):  # its provider has just found a way to it, or not
            await self._silent(entry)
        return None

    async def _answers(self, entry: Entry) -> bool:
        """Asked again when that fails at once: a way that broke is made anew."""
        if entry.link is None:
            entry.checked = self._clock.monotonic()
            return False
        for _ in range(2):
            try:
                async with asyncio.timeout(BUDGET):
                    await entry.link.ping()
            except TimeoutError:
                return False
            except CapsuleError:
                continue
            except OSError as error:
                return error.errno in _OURS
            entry.checked = self._clock.monotonic()
            return True
        return False

    async def _silent(self, entry: Entry) -> None:
        silent = self._clock.monotonic() - entry.checked
        if silent > SILENCE and entry.link is not None:
            await self._sandboxes.fail(
                entry, f"its agent has not answered for {silent:.0f} seconds"
            )

    async def explain(self, entry: Entry, error: UnavailableError, link: AgentLink) -> CapsuleError:
        """Why an operation lost its agent, which it had reached by `link`: the sandbox was ended or
        reset, its box is dead, or neither."""
        if _usable(entry) and entry.link is not link:
            return GoneError(
                f"sandbox {entry.id} was reset during the call",
                hint="what the call did is gone; the sandbox is as new",
                sandbox_id=entry.id,
                reset=True,
            )
        trouble = await self.check(entry)
        if _usable(entry):
            return _told(error, trouble)
        if entry.state is State.PAUSED:
            return WrongStateError(
                f"sandbox {entry.id} was paused during the call, which did not end by itself",
                hint="resume it; a program goes on then, and can be attached to",
                sandbox_id=entry.id,
            )
        if entry.state is State.FAILED:
            return UnavailableError(
                f"sandbox {entry.id} died during the call: {entry.reason}",
                hint="what the call did is unknown; delete the sandbox and create another",
                sandbox_id=entry.id,
            )
        return over(entry.id, entry.reason)


def _usable(entry: Entry) -> bool:
    return entry.state is State.RUNNING and entry.ending is None


def _told(error: UnavailableError, trouble: UnavailableError | None) -> UnavailableError:
    """What a caller learns whose sandbox lives, as far as one knows."""
    if error.hint:
        return error
    if trouble is not None:
        message, hint = f"{error.message}; {trouble.message}", trouble.hint
    else:
        message, hint = error.message, "what the call did is unknown: look before you repeat it"
    return UnavailableError(message, hint=hint, **error.details)
