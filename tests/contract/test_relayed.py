"""Boxes keep the contract through a relay as well: the link cannot tell it from a socket.

Only what leans on the stream the most: all of it runs where a provider uses a relay.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from capsule.model import Isolation
from capsule.providers.contract import Box, ByteStream, Provider
from capsule.providers.fake import Crooked, CrookedBox
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from capsule.providers.relay.mux import Mux
from capsule.testing.boxes import TestConnections
from capsule.testing.files import TestReadAndWrite
from capsule.testing.fixtures import launch, leftovers, provider, subject, template
from capsule.testing.harness import NewProvider
from capsule.testing.limits import TestStress
from capsule.testing.networking import TestDial, TestListen
from capsule.testing.outputs import TestOutput
from capsule.testing.running import TestInput
from capsule.testing.terminals import TestTerminal
from tests.support.relays import RelayProcess

__all__ = [
    "TestConnections",
    "TestDial",
    "TestInput",
    "TestListen",
    "TestOutput",
    "TestReadAndWrite",
    "TestStress",
    "TestTerminal",
    "launch",
    "leftovers",
    "provider",
    "subject",
    "template",
]

pytestmark = pytest.mark.real


class RelayedBox(CrookedBox):
    """One relay, started with the first connection and again when it is gone."""

    def __init__(self, inner: Box, agent: Path, socket: Path) -> None:
        super().__init__(inner)
        self._agent = agent
        self._socket = socket
        self._mux: Mux | None = None
        self._starting = asyncio.Lock()

    async def connect(self) -> ByteStream:
        async with self._starting:
            if self._mux is None or not self._mux.usable:
                self._mux = await Mux.start(await RelayProcess.start(self._agent, self._socket))
        return await self._mux.open()

    async def aclose(self) -> None:
        if self._mux is not None:
            await self._mux.aclose()

    async def destroy(self) -> None:
        await super().destroy()
        await self.aclose()


class Relayed(Crooked):
    def __init__(self, inner: Provider, settings: LocalSettings) -> None:
        super().__init__(inner)
        self._settings = settings
        self._boxes: list[RelayedBox] = []

    def wrap(self, box: Box) -> Box:
        socket = self._settings.run_dir / "boxes" / box.handle.sandbox_id / "agent.sock"
        relayed = RelayedBox(box, self._settings.agent, socket)
        self._boxes.append(relayed)
        return relayed

    async def aclose(self) -> None:
        for box in self._boxes:
            await box.aclose()
        await super().aclose()


@pytest.fixture
def new_provider(data_dir: Path, run_dir: Path, agent_binary: Path) -> NewProvider:
    settings = LocalSettings(data_dir, run_dir, agent_binary, isolation=Isolation.NAMESPACES)
    return lambda: Relayed(LocalProvider(settings), settings)
