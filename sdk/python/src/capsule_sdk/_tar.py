"""Folders as tar streams: packed from the local disk, and unpacked onto it without trusting them.

An archive from a sandbox was written by whoever runs code there. The standard library's own filter
has let such archives write outside (CVE-2025-4517), so nothing here extracts by name: a member's
path is taken apart, every parent must be a real directory, nothing is ever written through a link,
and a symlink is made only if following it cannot leave the folder.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from .errors import InternalError, InvalidError
from .values import Transfer

BLOCK = 512
CHUNK = 256 * 1024
LARGEST_HEADER = 1024 * 1024  # of a long name or a pax record


def pack(folder: Path, skipped: list[str] | None = None) -> Iterator[bytes]:
    """The tar stream of everything below `folder`, with names relative to it. What it leaves out
    and why is added to `skipped`."""
    left_out = [] if skipped is None else skipped
    if not folder.is_dir():
        raise InvalidError(f"not a folder: {folder}", hint="use write_file for a single file")
    for path in _walk(folder):
        yield from _member(path, path.relative_to(folder).as_posix(), left_out)
    yield bytes(2 * BLOCK)


def _walk(folder: Path) -> Iterator[Path]:
    todo = [folder]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                yield Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    todo.append(Path(entry.path))


def _member(path: Path, name: str, skipped: list[str]) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    found = path.lstat()
    info.mode = stat.S_IMODE(found.st_mode)
    info.mtime = int(found.st_mtime)
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = os.readlink(path)
    elif stat.S_ISREG(found.st_mode):
        info.size = found.st_size
    else:
        skipped.append(f"{name}: neither file, folder nor symlink")
        return
    yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    if info.size:
        yield from _content(path, info.size)


def _content(path: Path, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes and the padding, though the file may change while it is read."""
    left = size
    with path.open("rb") as file:
        while left and (chunk := file.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk
    while left:
        yield bytes(min(CHUNK, left))
        left -= min(CHUNK, left)
    yield bytes(-size % BLOCK)


class Unpacker:
    """Feed it a tar stream; it writes below `folder`, which is made if missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffer = bytearray()
        self._left = 0  # bytes of the current member still to come
        self._padding = 0
        self._file: IO[bytes] | None = None
        self._header: bytearray | None = None  # a long name or pax record being collected
        self._header_type = b""
        self._override: dict[str, str] = {}
        self._links: list[tuple[Path, str, str]] = []
        self._modes: list[tuple[Path, int]] = []
        self._files = 0
        self._bytes = 0
        self._skipped: list[str] = []
        self._ended = False

    def feed(self, chunk: bytes) -> None:
        self._buffer += chunk
        while not self._ended and self._advance():
            pass

    def finish(self) -> Transfer:
        """Make the links, now that nothing more is written. Raises if the stream was cut off."""
        self.close()
        if not self._ended:
            raise InternalError("the archive ended too early", hint="try again")
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, target, name in self._links:
            if path.is_dir() and not path.is_symlink():
                self._skipped.append(f"{name}: a folder has that name here")
            elif not self._refused(path, name):
                path.unlink(missing_ok=True)
                path.symlink_to(target)
        for path, mode in reversed(self._modes):
            path.chmod(mode)
        return Transfer(self._files, self._bytes, tuple(self._skipped))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _advance(self) -> bool:
        if self._left:
            return self._take_content()
        if self._padding:
            return self._take_padding()
        if len(self._buffer) < BLOCK:
            return False
        block = bytes(self._buffer[:BLOCK])
        del self._buffer[:BLOCK]
        if block == bytes(BLOCK):
            self._ended = True
            return False
        self._begin(block)
        return True

    def _take_content(self) -> bool:
        piece = bytes(self._buffer[: self._left])
        if not piece:
            return False
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        if self._header is not None:
            self._header += piece
        elif self._file is not None:
            self._file.write(piece)
            self._bytes += len(piece)
        if not self._left:
            self._end_content()
        return True

    def _take_padding(self) -> bool:
        dropped = min(self._padding, len(self._buffer))
        del self._buffer[:dropped]
        self._padding -= dropped
        return dropped > 0

    def _end_content(self) -> None:
        self.close()
        if self._header is not None:
            text = bytes(self._header)
            self._override.update(_read_override(self._header_type, text))
            self._header = None

    def _begin(self, block: bytes) -> None:
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise InternalError(f"the archive is damaged: {error}") from error
        if info.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            self._expect(info.size, header=info.type)
            return
        if info.type == tarfile.XGLTYPE:
            self._expect(info.size)
            return
        name = self._override.get("path", info.name)
        size = _size(self._override["size"]) if "size" in self._override else info.size
        target = self._override.get("linkpath", info.linkname)
        self._override = {}
        self._expect(size if info.isreg() else 0)
        self._make(info, name, target)
        if not size:
            self.close()

    def _expect(self, size: int, *, header: bytes = b"") -> None:
        if header and size > LARGEST_HEADER:
            raise InternalError(f"the archive is damaged: a header of {size} bytes")
        self._left, self._padding = size, -size % BLOCK
        self._header, self._header_type = (bytearray() if header else None), header

    def _make(self, info: tarfile.TarInfo, name: str, target: str) -> None:
        parts = [part for part in PurePosixPath(name).parts if part != "."]
        if name.startswith("/") or ".." in parts:
            self._skipped.append(f"{name}: leaves the folder")
            return
        if "\0" in name + target:
            self._skipped.append(f"{name!r}: has a NUL character")
            return
        path = self._folder.joinpath(*parts)
        if self._refused(path, name):
            return
        if info.isdir():
            self._folder_at(path, info.mode, name)
        elif info.issym():
            self._link(path, parts, target, name)
        elif info.isreg():
            self._open(path, info.mode, name)
        else:
            self._skipped.append(f"{name}: neither file, folder nor symlink")

    def _folder_at(self, path: Path, mode: int, name: str) -> None:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            self._skipped.append(f"{name}: something else has that name here")
            return
        path.mkdir(exist_ok=True)
        if path != self._folder:
            self._modes.append((path, mode & 0o755 | 0o700))

    def _open(self, path: Path, mode: int, name: str) -> None:
        if path.is_dir() and not path.is_symlink():
            self._skipped.append(f"{name}: a folder has that name here")
            return
        path.unlink(missing_ok=True)  # an existing link is replaced, never written through
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.fdopen(os.open(path, flags, mode & 0o755 | 0o600), "wb")
        self._files += 1

    def _refused(self, path: Path, name: str) -> bool:
        """Make the parents of `path`; True where one of them is a link or a file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for parent in reversed([p for p in path.parents if self._folder in p.parents]):
            if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
                self._skipped.append(f"{name}: {parent.name} is not a folder")
                return True
            parent.mkdir(exist_ok=True)
        return False

    def _link(self, path: Path, parts: list[str], target: str, name: str) -> None:
        if _stays_inside(parts, target):
            self._links.append((path, target, name))
        else:
            self._skipped.append(f"{name}: a link to {target}, outside the folder")


def _stays_inside(parts: list[str], target: str) -> bool:
    """Whether a link at `parts` leads inside. `..` may only come first: after another name it could
    step out of wherever that name, itself a link, has led."""
    steps = [step for step in target.split("/") if step not in ("", ".")]
    ups = 0
    while ups < len(steps) and steps[ups] == "..":
        ups += 1
    absolute = target.startswith("/")
    return not absolute and ".." not in steps[ups:] and ups <= len(parts) - 1


def _size(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InternalError(f"the archive is damaged: a size of {text[:40]!r}")
    return int(text)


def _read_override(kind: bytes, record: bytes) -> dict[str, str]:
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": record.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    if kind == tarfile.GNUTYPE_LONGLINK:
        return {"linkpath": record.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    return dict(_pax_records(record))


def _pax_records(record: bytes) -> Iterator[tuple[str, str]]:
    while record:
        length, _, _ = record.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(record):
            raise InternalError("the archive is damaged: a bad pax record")
        line, record = record[len(length) + 1 : int(length) - 1], record[int(length) :]
        key, _, value = line.partition(b"=")
        yield key.decode("utf-8", "replace"), value.decode("utf-8", "surrogateescape")
