"""A cloud's sandbox as a box: how its agent is reached, paused and ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from capsule.link.link import AgentLink
from capsule.model import MIB, Handle, Isolation
from capsule.providers.contract import Box, ByteStream
from capsule.providers.e2b import plan
from capsule.providers.e2b.cloud import Machine
from capsule.providers.e2b.plan import Place


class E2bBox(Box):
    isolation = Isolation.CLOUD
    idle_memory = MIB  # of this host; the rest is the cloud's
    over_layers = False

    def __init__(
        self,
        handle: Handle,
        machine: Machine,
        place: Place | None,
        *,
        connect: Callable[[], Awaitable[ByteStream]],
        pause: Callable[[], Coroutine[Any, Any, None]],
        resume: Callable[[], Coroutine[Any, Any, None]],
        remove: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.handle = handle
        self.unenforced = list(plan.unenforced(place))
        self.about = {"cloud": machine.id}
        if template := handle.data.get("template"):
            self.about["image"] = str(template)
        self.machine = machine
        self.place = place
        self._connect = connect
        self._pause = pause
        self._resume = resume
        self._remove = remove

    async def connect(self) -> ByteStream:
        return await self._connect()

    async def halt(self) -> None:
        """Its agent is nearer than the cloud's own management, and ends no more than programs."""
        await AgentLink(self.connect).shutdown()

    async def destroy(self) -> None:
        await self._remove()

    async def pause(self) -> None:
        await self._pause()

    async def resume(self) -> None:
        await self._resume()

    async def paused(self) -> bool:
        return (await self.machine.cloud.look(self.machine.id)).paused

    async def ping(self, within: float) -> dict[str, Any]:
        return await AgentLink(self.connect, timeout=within).ping()
