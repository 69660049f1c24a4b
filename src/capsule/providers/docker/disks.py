"""Disks of containers on this host: an ext4 image each, as the local provider's.

The agent mounts one where the whole host sees it, the Engine binds its folders into the container,
and then the host's own mount goes: from there on the disk lives and dies with the container. One
that begins from layers is an overlay over them; what is its own is bound as well, where only the
agent may go. Where there are no images a container's disks are tmpfs (plan.py), which count as its
memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capsule.errors import CapacityError, CapsuleError, NoSpaceError, UnavailableError
from capsule.host_errors import host_error
from capsule.model import WORKSPACE, Limits, VolumeMount
from capsule.providers.docker import hardening
from capsule.providers.docker.plan import TARGETS
from capsule.providers.docker.probe import Facts
from capsule.providers.local import disk as local
from capsule.providers.local.launcher import MOUNT_POINT, no_mount_point

MOUNT_WITHIN = 20.0
BY_SOCKET_ONLY = "only boxes that are reached by their sockets have one"
PROBE = ".probe"  # no box's id
UPPER_INSIDE = "/.capsule/upper"

_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class NoDiskError(UnavailableError):
    """The Engine does not see what we mount."""


class Disks:
    """`problem` is why there are none; "" when there are. `flat`: why none can lie over layers."""

    def __init__(self, agent: Path, data_dir: Path, stages: Path) -> None:
        self.problem = "not tried yet"
        self.flat = "not tried yet"
        self._agent = agent
        self._data_dir = data_dir
        self._stages = stages
        self._images = local.Disks(data_dir, "loop", None)

    async def open(self, setting: str, found: Facts) -> None:
        """Raises UnavailableError when images are wanted, and not to be had."""
        self.problem = await asyncio.to_thread(why_not, setting, found)
        if not self.problem:
            try:
                await asyncio.to_thread(self._prepare)
                await self.mount(PROBE, Limits())
                await self._try_layers()
            except CapsuleError as exc:
                self.problem = exc.message
            finally:
                await self.remove(PROBE)
        if self.problem and setting == "loop":
            raise UnavailableError(
                f"disk backing is set to loop, but containers can have none: {self.problem}",
                hint="set disk_backing to auto or memory",
            )

    async def _try_layers(self) -> None:
        layer = self._stages / PROBE / "layer"
        try:
            await self.let_go(PROBE)
            await asyncio.to_thread(layer.mkdir, 0o700)
            await self.mount(PROBE, Limits(), [layer])
            self.flat = ""
        except CapsuleError as exc:
            self.flat = exc.message

    def _prepare(self) -> None:
        self._images = local.Disks(self._data_dir, "loop", local.find_mkfs())
        self._images.prepare()
        self._stages.mkdir(mode=0o700, parents=True, exist_ok=True)

    def folder(self, sandbox_id: str) -> Path:
        return self._stages / sandbox_id / "disk"

    def _upper(self, sandbox_id: str) -> Path:
        return self._stages / sandbox_id / "upper"

    def binds(self, sandbox_id: str, *, over_layers: bool = False) -> dict[str, str]:
        """Where in the container its folders go, by their path on the host."""
        folders = {str(self.folder(sandbox_id) / name): to for name, to in TARGETS.items()}
        return folders | ({str(self._upper(sandbox_id)): UPPER_INSIDE} if over_layers else {})

    async def mount(
        self,
        sandbox_id: str,
        limits: Limits,
        layers: Sequence[Path] = (),
        points: Sequence[str] = (),
    ) -> None:
        """`points`: of volumes; made here, as the Engine would follow links to them."""
        order: dict[str, Any] = {
            "stage": str(self._stages / sandbox_id),
            "disk": await self._images.entry(sandbox_id, limits),
            "disk_dirs": [list(each) for each in local.DIRS],
            "uid": hardening.UID,
            "gid": hardening.GID,
            "volumes": [{"to": each.removeprefix("/")} for each in points],
        }
        if layers:
            order["layers"] = [str(layer.absolute()) for layer in layers]
        folders = [self.folder(sandbox_id), self._upper(sandbox_id)]
        await asyncio.to_thread(self._mount, folders, json.dumps(order))

    def _mount(self, points: Sequence[Path], order: str) -> None:
        try:
            for point in points:
                point.mkdir(mode=0o700, parents=True, exist_ok=True)
            done = subprocess.run(
                [str(self._agent), "disk", order],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=MOUNT_WITHIN,
            )
        except subprocess.TimeoutExpired as exc:
            text = f"the sandbox's disk was not mounted within {MOUNT_WITHIN:g} seconds"
            raise UnavailableError(text) from exc
        except OSError as exc:
            raise host_error("the sandbox's disk cannot be mounted", exc) from exc
        if done.returncode != 0:
            raise _failure(done.stderr.strip())

    async def let_go(self, sandbox_id: str) -> None:
        """Once the container has it. Idempotent."""
        for point in (self.folder(sandbox_id), self._upper(sandbox_id)):
            await asyncio.to_thread(_unmount, point)

    async def remove(self, sandbox_id: str) -> None:
        """Whatever is left of it on the host. Idempotent."""
        points = (self.folder(sandbox_id), self._upper(sandbox_id))
        await asyncio.to_thread(_remove, self._stages / sandbox_id, points)


def on_disk(volumes: Sequence[VolumeMount], home: str) -> list[str]:
    """The mount points that are folders of the disk, by the names that these have there."""
    found: list[str] = []
    for path in (each.path for each in volumes):
        if path.startswith(f"{home}/"):
            path = WORKSPACE + path.removeprefix(home)
        if path.startswith(f"{WORKSPACE}/"):
            found.append(path)
    return found


def why_not(setting: str, found: Facts) -> str:
    """What keeps containers from having images as disks, as far as one can tell without trying."""
    if setting == "memory":
        return "the disk_backing setting says memory"
    if not found.shares_root or os.geteuid() != 0:
        return "the Engine is not root's on this host"
    if local.find_mkfs() is None:
        return "mkfs.ext4 is not installed"
    return ""


def _failure(said: str) -> CapsuleError:
    text = f"the sandbox's disk cannot be mounted: {said or 'no reason given'}"
    if "No space left" in said:
        return NoSpaceError(text, hint="free some space below data_dir")
    if MOUNT_POINT in said and ("Not a directory" in said or "symbolic links" in said):
        return no_mount_point()
    if "loop device" in said:
        return CapacityError(text, hint="the host is at a limit; delete sandboxes")
    return UnavailableError(text)


def _unmount(folder: Path) -> None:
    """Also one that is mounted more than once; nothing happens where none is."""
    for _ in range(8):
        if _libc.umount2(os.fsencode(folder), _DETACH) != 0:
            return


def _remove(stage: Path, points: Sequence[Path]) -> None:
    for point in points:
        _unmount(point)
        if os.path.ismount(point):
            raise UnavailableError(f"the sandbox's disk is still mounted: {point}")
        _removing(point.rmdir)  # never more than a mount point: what is in it would be a sandbox's
    _removing(lambda: shutil.rmtree(stage))


def _removing(work: Callable[[], None]) -> None:
    try:
        work()
    except FileNotFoundError:
        return
    except OSError as exc:
        raise host_error("the sandbox's disk cannot be removed", exc) from exc
