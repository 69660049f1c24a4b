"""Interpreters that run in ready boxes, before somebody takes such a box and them with it.

They are extras: a box whose interpreter could not be started, or has ended, is a box all the same.
"""

from __future__ import annotations

from contextlib import suppress

import structlog

from capsule.errors import CapsuleError
from capsule.link.link import AgentLink
from capsule.model import MIB, ExecId, SandboxId, Template
from capsule.providers.contract import Box
from capsule.service.context import ContextRecord
from capsule.service.context_calls import default_record
from capsule.service.entry import environment
from capsule.service.interpreters import start_ahead

log = structlog.get_logger(__name__)

INTERPRETER = 16 * MIB  # at least


class Warm:
    def __init__(self) -> None:
        self._records: dict[SandboxId, ContextRecord] = {}  # by box

    async def start(self, template: Template, box: Box, now: float) -> int:
        """The interpreter that its template wants. Returns the bytes that it and what it has loaded
        take, about."""
        link = AgentLink(box.connect)
        try:
            record = default_record(template, template.warm_context, template.warm_imports, now)
            environ = environment(template, {})
            await start_ahead(link, template, record, environ)
        except CapsuleError as error:
            log.warning("no context ahead", template=template.name, reason=error.message)
            return INTERPRETER
        self._records[box.handle.sandbox_id] = record
        measured = 0
        with suppress(CapsuleError):  # then it is the least
            measured = (await link.usage()).memory_bytes or 0
        return max(measured, INTERPRETER)

    async def ping(self, box: Box) -> None:
        """Ask its agent whether it is there; an interpreter that has ended is forgotten."""
        link, record = AgentLink(box.connect), self._records.get(box.handle.sandbox_id)
        if record is None:
            await link.ping()
        elif not any(each.id == record.exec_id and each.running for each in await link.execs()):
            log.warning("context ahead has ended", box=box.handle.sandbox_id)
            self.take(box)

    async def make_room(self, box: Box, memory: int) -> None:
        """End an interpreter that leaves little of so many bytes, or would be killed for them."""
        if box.handle.sandbox_id in self._records:
            usage = await AgentLink(box.connect).usage()
            if 2 * (usage.memory_bytes or 0) > memory:
                await self.end(box)

    async def end(self, box: Box) -> None:
        if (record := self.take(box)) is not None:
            await AgentLink(box.connect).kill(ExecId(record.exec_id))

    def take(self, box: Box) -> ContextRecord | None:
        """It is whoever's now that the box is."""
        return self._records.pop(box.handle.sandbox_id, None)
