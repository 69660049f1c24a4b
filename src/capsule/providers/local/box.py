"""A running box of this host: how its agent is reached, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog

from capsule.errors import CapsuleError
from capsule.host_errors import host_errors
from capsule.link.ahead import Ahead
from capsule.link.link import AgentLink
from capsule.model import MIB, Handle, Isolation, Limits, Unenforced
from capsule.providers.contract import Box, ByteStream
from capsule.providers.local import records
from capsule.providers.local.adjust import Adjuster
from capsule.providers.local.launcher import ask

log = structlog.get_logger(__name__)

SHUTDOWN_TIMEOUT = 5.0


class LocalBox(Box):
    idle_memory = MIB  # measured: see docs/pools.md

    def __init__(
        self,
        handle: Handle,
        directory: Path,
        isolation: Isolation,
        unenforced: Sequence[Unenforced],
        *,
        sweep: Callable[[], Coroutine[Any, Any, None]],
        gone: Callable[[], Coroutine[Any, Any, None]],
        adjuster: Adjuster | None = None,
    ) -> None:
        self.handle = handle
        self.isolation = isolation
        self.unenforced = unenforced
        self._directory = directory
        self._agent = way_to(directory)
        self._sweep = sweep
        self._gone = gone
        self._adjuster = adjuster

    def adjusts(self, limits: Limits) -> bool:
        return self._adjuster is not None and self._adjuster.adjusts(limits)

    async def adjust(self, limits: Limits) -> None:
        assert self._adjuster is not None
        with host_errors("the sandbox cannot be given other limits"):
            await asyncio.to_thread(self._adjuster.apply, limits)
        if limits.open_files != self._adjuster.launched.open_files:
            await AgentLink(self.connect).adjust(open_files=limits.open_files)

    async def connect(self) -> ByteStream:
        return await self._agent.connect()

    async def pause(self) -> None:
        await AgentLink(self.connect).freeze()

    async def resume(self) -> None:
        await AgentLink(self.connect).thaw()

    async def destroy(self) -> None:
        try:
            await shut_down(self._agent)
        except CapsuleError as exc:
            if records.exists(self._directory):
                log.warning(
                    "box had to be swept", sandbox=self.handle.sandbox_id, reason=exc.message
                )
        if records.exists(self._directory):
            await self._sweep()
        await self._gone()


async def shut_down(agent: Ahead) -> None:
    """Returns when the keeper has removed its box. Raises UnavailableError when there is none.

    The disk is the kernel's to take back: that ends a moment later, without anybody's help.
    """
    await ask(agent.connect_last, {"op": "shutdown"}, timeout=SHUTDOWN_TIMEOUT)


def way_to(directory: Path) -> Ahead:
    return Ahead(f"{directory}/{records.SOCKET}")
