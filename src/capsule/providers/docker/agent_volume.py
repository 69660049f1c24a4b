"""The agent's binary on an Engine that does not see our files: in a volume of its own.

It is named after its content and made once for each Engine, through a container that never
runs. It stays when its boxes go, for the next ones; those of other versions are removed as soon as
nothing uses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import structlog

from capsule.errors import CapsuleError, ConflictError
from capsule.providers.docker import plan
from capsule.providers.docker.engine import Engine
from capsule.providers.docker.helpers import Helpers

log = structlog.get_logger(__name__)

FOLDER = "/.capsule/bin"
FILE = "capsule-agent"
MODE = 0o500  # for root of a container; programs have no business with it
LABEL = "capsule.agent"


class AgentVolume:
    def __init__(self, engine: Engine, agent: Path, helpers: Helpers) -> None:
        self._engine = engine
        self._agent = agent
        self._helpers = helpers
        self._ready: str | None = None
        self._making = asyncio.Lock()  # one copy, however many launch at once

    async def name(self, image: str) -> str:
        """With the agent in it. `image` is any that the Engine has."""
        if self._ready is None:
            async with self._making:
                if self._ready is None:
                    self._ready = await self._make(image)
        return self._ready

    def forget(self) -> None:
        """Somebody may have removed it."""
        self._ready = None

    async def _make(self, image: str) -> str:
        binary = await asyncio.to_thread(self._agent.read_bytes)
        digest = hashlib.sha256(binary).hexdigest()[:12]
        name = f"capsule-agent-{digest}"
        await self._engine.make_volume(name, {LABEL: digest})
        await self._fill(name, image, binary)
        await self._drop_others(name)
        return name

    async def _fill(self, volume: str, image: str, binary: bytes) -> None:
        async with self._helpers.container(image, [mount(volume, read_only=False)]) as helper:
            size = await self._engine.size(helper, f"{FOLDER}/{FILE}")
            if size != len(binary):
                await self._engine.put(helper, FOLDER, _tar(binary))
                log.info("copied the agent to the Engine", volume=volume)

    async def _drop_others(self, name: str) -> None:
        with contextlib.suppress(CapsuleError):
            for volume in await self._engine.volumes(LABEL):
                if volume["Name"] != name:
                    with contextlib.suppress(ConflictError):
                        await self._engine.remove_volume(volume["Name"])


def mount(name: str, *, read_only: bool = True) -> dict[str, Any]:
    return plan.volume(name, FOLDER, read_only=read_only)


def _tar(binary: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo(FILE)
        entry.size, entry.mode = len(binary), MODE
        tar.addfile(entry, io.BytesIO(binary))
    return file.getvalue()
