"""The way into a sandbox: refused unless it runs, counted as activity, explained when it breaks."""

from __future__ import annotations

from types import TracebackType

from capsule.errors import UnavailableError
from capsule.link.link import AgentLink
from capsule.service.clock import Clock
from capsule.service.entry import Entry
from capsule.service.pulse import Pulse
from capsule.service.sandboxes import Sandboxes


class Visit:
    """`async with access.visit(id) as link:` around one operation."""

    __slots__ = ("_access", "_link", "entry")

    def __init__(self, access: Access, entry: Entry) -> None:
        self.entry = entry
        self._access = access
        self._link = entry.running()

    async def __aenter__(self) -> AgentLink:
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
            raise await self._access.pulse.explain(entry, error) from error


class Access:
    def __init__(self, sandboxes: Sandboxes, pulse: Pulse, clock: Clock) -> None:
        self.sandboxes = sandboxes
        self.pulse = pulse
        self.clock = clock

    def visit(self, id: str | Entry) -> Visit:
        """Raises NotFoundError, GoneError, WrongStateError at once."""
        return Visit(self, id if isinstance(id, Entry) else self.sandboxes.find(id))

    def touch(self, entry: Entry) -> None:
        """Somebody uses it. Whether its agent answers is another matter, and the pulse's."""
        entry.active = self.clock.monotonic()
