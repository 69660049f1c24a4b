"""Volumes of containers: the Engine's own, by name and label, for as long as somebody keeps them.

They belong to our data directory, wherever the server runs from. A new one of Docker's is root's:
before a box first has it, it is given to the sandbox's user, by way of a container that never runs.
Podman makes it the user's from the start.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Sequence
from typing import Any

from capsule.errors import (
    CapsuleError,
    ConflictError,
    InvalidError,
    NotFoundError,
    NotSupportedError,
    UnavailableError,
)
from capsule.model import VolumeMount
from capsule.providers.contract import OutOfReachError
from capsule.providers.docker import hardening, plan
from capsule.providers.docker.engine import Engine
from capsule.providers.docker.helpers import Helpers

LABEL = "capsule.volume"
LABEL_DATA = "capsule.data"
FOLDER = "data"  # where a helper has it, below its root
PROBE = "probe"  # no volume's id


class ContainerVolumes:
    """`data`: which data directory they are of."""

    def __init__(self, engine: Engine, helpers: Helpers, data: str, *, podman: bool) -> None:
        self.sized = False  # whether the Engine holds them to a size: learnt by `open`
        self._engine = engine
        self._helpers = helpers
        self._data = data
        self._podman = podman
        self._given: set[str] = set()  # to the sandbox's user, as far as we know
        self._giving = asyncio.Lock()

    async def open(self) -> None:
        """Only its answer to one with a size tells whether an Engine can do that."""
        try:
            await self.make(PROBE, 2**24)
        except OutOfReachError:
            raise
        except CapsuleError:
            return
        await self.drop(PROBE)
        self.sized = True

    async def make(self, id: str, size: int | None) -> None:
        """Raises NotSupportedError (the size), NoSpaceError, UnavailableError."""
        options = {"o": f"uid={hardening.UID},gid={hardening.GID}"} if self._podman else {}
        options |= {} if size is None else {"size": str(size)}
        try:
            await self._engine.make_volume(self._name(id), self._labels(id), options)
        except (InvalidError, UnavailableError) as exc:
            if size is None or "quota" not in exc.message:
                raise
            raise NotSupportedError(
                f"this Engine cannot hold a volume to a size: {exc.message}",
                hint="its volumes must be on XFS with project quotas",
            ) from exc

    async def ids(self) -> Sequence[str]:
        found = await self._engine.volumes(f"{LABEL_DATA}={self._data}")
        return sorted({str((each.get("Labels") or {}).get(LABEL)) for each in found})

    async def drop(self, id: str) -> None:
        """Raises UnavailableError while a container has it."""
        try:
            await self._engine.remove_volume(self._view_name(id))
            await self._engine.remove_volume(self._name(id))
        except ConflictError as exc:
            raise UnavailableError(f"the volume is still in use: {exc.message}") from exc
        self._given.discard(id)

    async def mounts(
        self, wanted: Sequence[VolumeMount], image: str, *, gvisor: bool
    ) -> list[dict[str, Any]]:
        """What the Engine is told of them. Raises NotFoundError."""
        return [await self._mounted(each, image, gvisor) for each in wanted]

    async def _mounted(self, wanted: VolumeMount, image: str, gvisor: bool) -> dict[str, Any]:
        name = self._name(wanted.id)
        found = await self._engine.volume(name)
        if found is None:  # the Engine would make one up
            raise NotFoundError(f"volume {wanted.name or wanted.id} is not in the Engine any more")
        await self._give(wanted.id, image)
        if gvisor and wanted.read_only:
            name = await self._view(wanted.id, str(found["Mountpoint"]))
        return plan.volume(name, wanted.path, read_only=wanted.read_only)

    async def _view(self, id: str, place: str) -> str:
        """The same once more, mounted read-only by the Engine: gVisor empties a file of a read-only
        mount that is opened with O_TRUNC, and only then refuses to write to it."""
        name = self._view_name(id)
        options = {"type": "none", "o": "bind,ro,nosuid,nodev", "device": place}
        await self._engine.make_volume(name, self._labels(id), options)
        return name

    async def _give(self, id: str, image: str) -> None:
        async with self._giving:
            if id in self._given or self._podman:
                return
            mount = plan.volume(self._name(id), f"/{FOLDER}", read_only=False)
            async with self._helpers.container(image, [mount]) as helper:
                mode = await self._engine.mode(helper, f"/{FOLDER}")
                await self._engine.put(helper, "/", _owned(mode))
            self._given.add(id)

    def _labels(self, id: str) -> dict[str, str]:
        return {LABEL: id, LABEL_DATA: self._data}

    def _view_name(self, id: str) -> str:
        return f"{self._name(id)}-ro"

    def _name(self, id: str) -> str:
        if not id.isalnum():
            raise InvalidError(f"not the id of a volume: {id[:80]!r}")
        return f"capsule-{self._data}-volume-{id}"


def _owned(mode: int) -> bytes:
    """The folder itself, which is there already, as the sandbox's user's."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo(f"{FOLDER}/")
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        entry.uid = entry.gid = hardening.UID
        tar.addfile(entry)
    return file.getvalue()
