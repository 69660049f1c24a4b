"""What a box writes on: an ext4 image of its own, else a sized tmpfs, else a plain directory.

An image enforces bytes and inodes and costs no memory. One empty image per size is formatted once
and copied for each box; its inode tables are never written, so a gigabyte takes about 50 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capsule.errors import InvalidError, UnavailableError
from capsule.host_errors import host_error
from capsule.model import MIB, SYSTEM_PATH, Isolation, Limits
from capsule.providers.local.sized import reserve

DIRS: tuple[tuple[str, int], ...] = (
    ("workspace", 0o755),
    ("tmp", 0o1777),
    ("var-tmp", 0o1777),
    ("root", 0o700),
)

RESERVED_INODES = 11 + 1 + len(DIRS)  # ext4's own, lost+found, and our directories
MAX_TEMPLATES = 64
SMALLEST = 2 * MIB  # ext4 below that has no room for anything


def find_mkfs() -> Path | None:
    found = shutil.which("mkfs.ext4", path=SYSTEM_PATH)
    return Path(found) if found else None


def choose_backing(isolation: Isolation, setting: str, *, loop: bool, mkfs: bool) -> str:
    """One of loop, tmpfs, dir. Raises UnavailableError for a setting that cannot be met."""
    if isolation is Isolation.LANDLOCK:
        return "dir"  # without a mount namespace there is nowhere to mount anything
    if setting == "loop" and not (loop and mkfs):
        missing = "mkfs.ext4" if loop else "loop devices"
        raise UnavailableError(
            f"disk backing is set to loop, but this host has no usable {missing}",
            hint="set disk_backing to auto or memory, or run as root with e2fsprogs installed",
        )
    return "loop" if loop and mkfs and setting != "memory" else "tmpfs"


class Disks:
    """The `disk` part of a launch request, with the image it names made if need be."""

    def __init__(self, data_dir: Path, backing: str, mkfs: Path | None) -> None:
        self.backing = backing
        self._images = data_dir / "disks"
        self._boxes = data_dir / "boxes"
        self._mkfs = mkfs
        # One mkfs at a time: two creates of a new size share one image instead of racing.
        self._making = asyncio.Lock()

    def prepare(self) -> None:
        if self.backing == "loop":
            self._images.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif self.backing == "dir":
            self._boxes.mkdir(parents=True, exist_ok=True)
            self._boxes.chmod(0o711)  # programs reach their own directory below, and list no other

    def directory(self, box: str) -> Path | None:
        """What is left on the host's disk while the box runs."""
        return self._boxes / box if self.backing == "dir" else None

    async def entry(self, box: str, limits: Limits) -> dict[str, Any]:
        match self.backing:
            case "loop":
                image = await self._image(limits)
                return {"kind": "loop", "template": image, "dir": str(self._images)}
            case "tmpfs":
                inodes = limits.inodes + len(DIRS) + 1
                return {"kind": "tmpfs", "size": limits.disk, "inodes": inodes}
        return {"kind": "dir", "path": str(self._boxes / box)}

    async def _image(self, limits: Limits) -> str:
        size, inodes = image_size(limits)
        path = f"{self._images}/{size}-{inodes}.img"
        if _touch(path):
            return path
        async with self._making:
            if not _touch(path):
                await asyncio.to_thread(self._make, Path(path), size, inodes)
        return path

    def _make(self, path: Path, size: int, inodes: int) -> None:
        if self._mkfs is None:
            raise UnavailableError("mkfs.ext4 is not installed", hint="install e2fsprogs")
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with open(draft, "xb") as file:
                file.truncate(size)
            _format(self._mkfs, draft, inodes)
            os.rename(draft, path)
        except OSError as exc:
            raise host_error("the disk image cannot be made", exc) from exc
        finally:
            draft.unlink(missing_ok=True)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        images = sorted(self._images.glob("*.img"), key=_last_use)
        for image in images[:-MAX_TEMPLATES]:
            image.unlink(missing_ok=True)


def image_size(limits: Limits) -> tuple[int, int]:
    """Bytes and inodes of the image: whole MiB, and tables that leave most of it for data."""
    size = max(SMALLEST, -(-limits.disk // MIB) * MIB)
    return size, min(limits.inodes + RESERVED_INODES, size // 1024)


def _touch(path: str) -> bool:
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _last_use(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def format_volume(mkfs: Path | None, image: Path, size: int, *, content: Path) -> None:
    """A file system that lasts, so it has a journal, and begins with what is in the folder
    `content`. Blocks. Raises UnavailableError, InvalidError, NoSpaceError."""
    if mkfs is None:
        raise UnavailableError("mkfs.ext4 is not installed", hint="install e2fsprogs")
    with open(image, "xb") as file:
        file.truncate(size)
    reserve(image)
    options = ["-i", "8192", "-J", "size=4"]
    options += ["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"]
    _run_mkfs(mkfs, image, [*options, "-d", str(content)], field="size")
    reserve(image)  # it may have given some back: to punch a hole is how it writes zeros


def _format(mkfs: Path, image: Path, inodes: int) -> None:
    """No journal and no second superblock: the image is gone with its box, nothing is recovered.

    Each part of the image that is written is one more to copy for every box. Our directories are in
    it all the same: to make them in a file system that nobody has used yet takes longer.
    """
    options = ["-N", str(inodes), "-O", "^has_journal,^resize_inode,^huge_file,sparse_super2"]
    options += ["-E", "lazy_itable_init=1,nodiscard,num_backup_sb=0"]
    with tempfile.TemporaryDirectory(prefix="capsule-disk-") as content:
        for name, mode in DIRS:
            Path(content, name).mkdir()
            Path(content, name).chmod(mode)
        _run_mkfs(mkfs, image, [*options, "-d", content], field="limits.disk")


def _run_mkfs(mkfs: Path, image: Path, options: Sequence[str], *, field: str) -> None:
    command = [str(mkfs), "-q", "-F", "-b", "4096", "-m", "0", *options, str(image)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as exc:
        raise UnavailableError("mkfs.ext4 did not end within 60 s") from exc
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise InvalidError(
            f"mkfs.ext4 refuses {image.stat().st_size} bytes: {said[0]}",
            hint="ask for a larger one, or for fewer inodes",
            field=field,
        )
