"""From the store's layers back to an archive, as `docker save` would have written it.

What an import dropped does not come back: everything belongs to root, and nothing is set-uid.
Deletions become the markers that they were (`.wh.NAME`, `.wh..wh..opq`).
"""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from capsule.providers.docker_archive import END, Writer, config_name, manifest, padding
from capsule.providers.local.image_store import Image, ImageConfig, ImageStore
from capsule.providers.local.manifests import native
from capsule.providers.local.unpack import is_deleted, is_opaque

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1024 * 1024

Write = Callable[[bytes], object]


def export_image(name: str, store_dir: Path, target: BinaryIO, reference: str) -> None:
    """Write image `name` to `target`, a new file that can seek. Blocks. Raises NotFoundError."""
    store = ImageStore(store_dir)
    image = store.read(name)
    with store.importing():  # nothing is cleared away meanwhile
        writer = Writer(target)
        digests: list[str] = []
        names: list[str] = []
        for id in image.layers:
            names.append(f"{id}/layer.tar")
            with writer.adding(names[-1]) as content:
                _Layer(content.write).run(store.layer(id))
            digests.append(content.digest)
        config = json.dumps(_config(image, digests)).encode()
        writer.add(config_name(config), config)
        writer.add("manifest.json", manifest(config_name(config), names, reference))
        writer.finish()


def _config(image: Image, digests: list[str]) -> dict[str, Any]:
    system, arch = native()
    created = datetime.fromtimestamp(image.created, UTC).isoformat()
    return {
        "os": system,
        "architecture": arch,
        "created": created,
        "config": _defaults(image.config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{"created": created, "created_by": "capsule template export"} for _ in digests],
    }


def _defaults(config: ImageConfig) -> dict[str, Any]:
    return {
        "Env": [f"{key}={value}" for key, value in config.env.items()],
        "WorkingDir": config.working_dir,
        "Entrypoint": list(config.entrypoint) or None,
        "Cmd": list(config.cmd) or None,
        "User": config.user,
    }


class _Layer:
    """One layer's folder as a tar. Nothing in it is followed: strangers wrote its links."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._seen: dict[tuple[int, int], str] = {}  # files with several names, by inode

    def run(self, folder: Path) -> None:
        todo: list[str] = [""]
        while todo:
            place = todo.pop()
            fd = _open_beneath(folder, place)
            try:
                if is_opaque(fd):
                    self._member(_join(place, ".wh..wh..opq"), tarfile.REGTYPE, 0o644, 0)
                inner = (name for name in sorted(os.listdir(fd)) if self._entry(fd, name, place))
                todo += [_join(place, name) for name in inner]
            finally:
                os.close(fd)
        self._write(END)

    def _entry(self, parent: int, name: str, place: str) -> bool:
        """True: it is a folder, whose content comes later."""
        path = _join(place, name)
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        mode, mtime = stat.S_IMODE(found.st_mode), found.st_mtime
        if stat.S_ISDIR(found.st_mode):
            self._member(path, tarfile.DIRTYPE, mode, mtime)
            return True
        if is_deleted(found):
            self._member(_join(place, f".wh.{name}"), tarfile.REGTYPE, 0o644, 0)
        elif stat.S_ISLNK(found.st_mode):
            target = os.readlink(name, dir_fd=parent)
            self._member(path, tarfile.SYMTYPE, mode, mtime, target=target)
        elif stat.S_ISREG(found.st_mode):
            self._file(parent, name, path, found)
        return False

    def _file(self, parent: int, name: str, path: str, found: os.stat_result) -> None:
        mode = stat.S_IMODE(found.st_mode)
        inode = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and (first := self._seen.setdefault(inode, path)) != path:
            self._member(path, tarfile.LNKTYPE, mode, found.st_mtime, target=first)
            return
        self._member(path, tarfile.REGTYPE, mode, found.st_mtime, size=found.st_size)
        fd = os.open(name, _FILE, dir_fd=parent)
        try:
            for chunk in _content(fd, found.st_size):
                self._write(chunk)
        finally:
            os.close(fd)
        self._write(padding(found.st_size))

    def _member(
        self, path: str, kind: bytes, mode: int, mtime: float, *, size: int = 0, target: str = ""
    ) -> None:
        member = tarfile.TarInfo(path)
        member.type, member.mode, member.size, member.linkname = kind, mode, size, target
        member.mtime = int(mtime)
        self._write(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


def _content(fd: int, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes: the store's layers do not change, and a damaged one must not hang."""
    left = size
    while left:
        chunk = os.read(fd, min(_CHUNK, left))
        if not chunk:
            raise OSError(f"a file of the store became shorter, {left} bytes are missing")
        left -= len(chunk)
        yield chunk


def _open_beneath(folder: Path, path: str) -> int:
    fd = os.open(folder, _DIR)
    try:
        for part in path.split("/") if path else ():
            inner = os.open(part, _DIR, dir_fd=fd)
            os.close(fd)
            fd = inner
    except BaseException:
        os.close(fd)
        raise
    return fd


def _join(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name
