"""The way to an agent through the Engine: one exec of `capsule-agent relay` for each box.

Relays ─┬─ Relay of a box ── Mux (its tasks), from the first connect on
        └─ closed with their box, and all of them by `aclose`; a broken one is made again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from capsule.errors import ConflictError, NotFoundError, UnavailableError
from capsule.link.unix import NobodyListensError
from capsule.providers.contract import ByteStream
from capsule.providers.docker.engine import Engine
from capsule.providers.docker.mux import Mux
from capsule.providers.docker.stdio import demultiplex

START_WITHIN = 10.0


class Relays:
    def __init__(self, engine: Engine, name: Callable[[str], str], command: list[str]) -> None:
        self._engine = engine
        self._name = name
        self._command = command
        self._relays: dict[str, Relay] = {}

    async def connect(self, sandbox_id: str) -> ByteStream:
        relay = self._relays.get(sandbox_id)
        if relay is None:
            name = self._name(sandbox_id)
            relay = self._relays[sandbox_id] = Relay(self._engine, name, self._command)
        return await relay.connect()

    async def close(self, sandbox_id: str) -> None:
        relay = self._relays.pop(sandbox_id, None)
        if relay is not None:
            await relay.aclose()

    async def aclose(self) -> None:
        relays, self._relays = self._relays, {}
        for relay in relays.values():
            await relay.aclose()


class Relay:
    def __init__(self, engine: Engine, container: str, command: list[str]) -> None:
        self._engine = engine
        self._container = container
        self._command = command
        self._mux: Mux | None = None
        self._closed = False
        self._starting = asyncio.Lock()  # one exec, however many connect at once

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
                self._mux = await self._start()
            return self._mux

    async def _start(self) -> Mux:
        try:
            async with asyncio.timeout(START_WITHIN):
                stream = await self._engine.exec(self._container, self._command)
                return await Mux.start(demultiplex(stream))
        except (NotFoundError, ConflictError) as exc:
            raise NobodyListensError(f"agent is not there: {exc.message}") from exc
        except TimeoutError:
            raise UnavailableError(
                f"no stream through the Engine within {START_WITHIN:g} seconds"
            ) from None

    async def aclose(self) -> None:
        self._closed = True
        await self._drop()

    async def _drop(self) -> None:
        mux, self._mux = self._mux, None
        if mux is not None:
            await mux.aclose()
