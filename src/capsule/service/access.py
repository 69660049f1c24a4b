"""The way into a sandbox: refused unless it runs, counted as activity, explained when it breaks."""

from __future__ import annotations

from types import TracebackType

from capsule.errors import UnavailableError
from capsule.link.link import AgentLink
from capsule.model import State
from capsule.service.clock import Clock
from capsule.service.entry import Entry
from capsule.service.pausing import Pausing
from capsule.service.pulse import Pulse
from capsule.service.sandboxes import Sandboxes


class Visit:
    """`async with access.visit(id) as link:` around one operation."""

    __slots__ = ("_access", "_link", "entry")

    def __init__(self, access: Access, entry: Entry) -> None:
        self.entry = entry
        self._access = access
        if not _sleeps(entry):
            entry.running()

    async def __aenter__(self) -> AgentLink:
        self._link = await self._access.awake(self.entry)
        self.entry.using += 1
        return self._link

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entry = self.entry
        entry.using -= 1
        entry.active = self._access.clock.monotonic()
        if error is None:
            entry.checked = entry.active  # its agent has just answered
        elif isinstance(error, UnavailableError):
            raise await self._access.pulse.explain(entry, error, self._link) from error


class Access:
    def __init__(self, sandboxes: Sandboxes, pulse: Pulse, pausing: Pausing, clock: Clock) -> None:
        self.sandboxes = sandboxes
        self._pausing = pausing
        self.pulse = pulse
        self.clock = clock

    def visit(self, id: str | Entry) -> Visit:
        """Raises NotFoundError, GoneError, WrongStateError at once."""
        return Visit(self, id if isinstance(id, Entry) else self.sandboxes.find(id))

    async def awake(self, entry: Entry) -> AgentLink:
        """The way to its agent; one that may be woken by traffic is."""
        if entry.shifting.locked():  # it stands still for a moment: nobody is refused for it
            async with entry.shifting:
                pass
        await self.wake(entry)
        return entry.running()

    async def wake(self, entry: Entry) -> None:
        """If it is paused, and may be woken."""
        if _sleeps(entry):
            await self._pausing.resume(entry)

    def touch(self, entry: Entry) -> None:
        """Somebody uses it. Whether its agent answers is another matter, and the pulse's."""
        entry.active = self.clock.monotonic()


def _sleeps(entry: Entry) -> bool:
    return entry.state is State.PAUSED and entry.auto_resume
