"""The relays of boxes, each started with the first connection to its box.

Relays ─┬─ Relay of a box ── Mux (its tasks), from the first connect on
        └─ closed with their box, and all of them by `aclose`; a broken one is made again
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from capsule.errors import ConflictError, NotFoundError, UnavailableError
from capsule.link.unix import NobodyListensError
from capsule.providers.contract import ByteStream
from capsule.providers.relay.mux import Mux

START_WITHIN = 10.0

# Starts the process in a box, by its id, and gives the stream to it. Raises NotFoundError or
# ConflictError when there is no such box, or it does not run.
Start = Callable[[str], Awaitable[ByteStream]]


class Relays:
    """`through`: what carries them, for people."""

    def __init__(self, start: Start, through: str, *, within: float = START_WITHIN) -> None:
        self._start = start
        self._through = through
        self._within = within
        self._relays: dict[str, Relay] = {}

    async def connect(self, sandbox_id: str) -> ByteStream:
        relay = self._relays.get(sandbox_id)
        if relay is None:
            relay = self._relays[sandbox_id] = Relay(
                lambda: self._start(sandbox_id), self._through, self._within
            )
        return await relay.connect()

    async def close(self, sandbox_id: str) -> None:
        relay = self._relays.pop(sandbox_id, None)
        if relay is not None:
            await relay.aclose()

    async def aclose(self) -> None:
        relays, self._relays = self._relays, {}
        await asyncio.gather(*(relay.aclose() for relay in relays.values()))


class Relay:
    def __init__(
        self, start: Callable[[], Awaitable[ByteStream]], through: str, within: float
    ) -> None:
        self._start = start
        self._through = through
        self._within = within
        self._mux: Mux | None = None
        self._closed = False
        self._starting = asyncio.Lock()  # one process, however many connect at once

    async def connect(self) -> ByteStream:
        mux = self._mux
        if mux is None or not mux.usable:
            mux = await self._started()
        return await mux.open()

    async def _started(self) -> Mux:
        async with self._starting:
            if self._closed:
                raise UnavailableError("the box is gone")
            if self._mux is None or not self._mux.usable:
                await self._drop()
                self._mux = await self._begin()
            return self._mux

    async def _begin(self) -> Mux:
        try:
            async with asyncio.timeout(self._within):
                return await Mux.start(await self._start())
        except (NotFoundError, ConflictError) as exc:
            raise NobodyListensError(f"agent is not there: {exc.message}") from exc
        except TimeoutError:
            raise UnavailableError(
                f"no stream through {self._through} within {self._within:g} seconds"
            ) from None

    async def aclose(self) -> None:
        self._closed = True
        await self._drop()

    async def _drop(self) -> None:
        mux, self._mux = self._mux, None
        if mux is not None:
            await mux.aclose()
