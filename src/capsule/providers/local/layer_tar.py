"""Layers as a tar, and back: the form in which snapshots leave the host and come to it.

Going out, a stack is walked as overlayfs would merge it, without mounting and following nothing;
folders are opened from the top of their layer each time, so depth costs no descriptors. Coming in,
the tar is a stranger's: it may hold files, folders, symbolic links (which lead where they like,
nobody follows them here) and hard links among its own files, each name once, below the places that
a sandbox may write. Anything else is refused, never skipped; all that is written goes through
`LayerFolder`. Blocks of zeros become holes. Of extended attributes those of files go along that a
layer keeps (`layer_attributes`), in pax headers as GNU tar writes them.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from capsule.errors import ForbiddenError, InvalidError, TooLargeError
from capsule.providers.contract import ARCHIVED
from capsule.providers.docker_archive import padding
from capsule.providers.local.layer_attributes import pack, packed, told
from capsule.providers.local.layer_diff import PLACES, Folder, Names, Stack, opened
from capsule.providers.local.layer_folder import LayerFolder
from capsule.providers.local.tarball import Kind, Member, Source, Tar, attribute_key, shown

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1024 * 1024
_MOST_LINKED = 100_000  # files with several names that are remembered; others become copies


class _Item(NamedTuple):
    path: bytes  # as programs see it
    info: os.stat_result
    target: bytes  # of a link
    folder: Folder  # that has it; of folders: itself


class Packer:
    """A stack of layers, topmost first. All of it blocks."""

    def __init__(self, layers: Sequence[Path], *, most_bytes: int) -> None:
        self._layers = tuple(layers)
        self._most = most_bytes
        self._linked: dict[tuple[int, int], bytes] = {}

    def check(self) -> None:
        """What would end the stream later is known before it begins."""
        total = 0
        try:
            for item in self._walk():
                total += item.info.st_size if stat.S_ISREG(item.info.st_mode) else 0
                if total > self._most:
                    raise _too_large(self._most)
                if stat.S_ISREG(item.info.st_mode) and not _readable(item.info):
                    raise _closed(item.path)
        except PermissionError as error:
            raise _closed(os.fsencode(error.filename or b"a folder")) from error

    def pieces(self) -> Generator[bytes]:
        for item in self._walk():
            mode = item.info.st_mode
            if stat.S_ISDIR(mode):
                yield _header(item, tarfile.DIRTYPE)
            elif stat.S_ISLNK(mode):
                yield _header(item, tarfile.SYMTYPE, target=item.target)
            elif stat.S_ISREG(mode):
                yield from self._file(item)

    def _file(self, item: _Item) -> Iterator[bytes]:
        if item.info.st_nlink > 1 and (first := self._first_name(item)) != item.path:
            yield _header(item, tarfile.LNKTYPE, target=ARCHIVED + first[1:])
            return
        left = item.info.st_size
        fd = item.folder.open(item.path.rpartition(b"/")[2], _FILE)
        try:
            yield _header(item, tarfile.REGTYPE, size=left, attributes=packed(fd))
            while left:
                chunk = os.read(fd, min(_CHUNK, left))
                if not chunk:
                    raise OSError(f"a file of a layer became shorter, {left} bytes are missing")
                left -= len(chunk)
                yield chunk
        finally:
            os.close(fd)
        yield padding(item.info.st_size)

    def _first_name(self, item: _Item) -> bytes:
        inode = (item.info.st_dev, item.info.st_ino)
        if len(self._linked) >= _MOST_LINKED and inode not in self._linked:
            return item.path
        return self._linked.setdefault(inode, item.path)

    def _walk(self) -> Iterator[_Item]:
        """Depth first, a folder before what is in it."""
        todo: list[tuple[bytes, Names, Stack]] = []
        with opened(self._layers, ()) as parts:
            top = Folder(parts)
            for name, place in sorted(PLACES.items(), reverse=True):
                if layers := top.inside(name):
                    todo.append((place, (name,), layers))
        while todo:
            path, at, layers = todo.pop()
            with opened(layers, at) as parts:
                folder = Folder(parts)
                yield _Item(path, os.fstat(parts[0][1]), b"", folder)
                inner = []
                for name in sorted(folder.names()):
                    entry = folder.find(name)
                    if entry is None:
                        continue
                    if entry.kind == "dir":
                        inner.append((path + b"/" + name, (*at, name), folder.inside(name)))
                    else:
                        yield _Item(path + b"/" + name, entry.info, entry.target, folder)
                todo += reversed(inner)


def _readable(info: os.stat_result) -> bool:
    return os.geteuid() == 0 or bool(info.st_mode & stat.S_IRUSR)


def _header(
    item: _Item, kind: bytes, *, size: int = 0, target: bytes = b"", attributes: bytes = b""
) -> bytes:
    member = tarfile.TarInfo(os.fsdecode(ARCHIVED + item.path[1:]))
    member.type, member.size, member.linkname = kind, size, os.fsdecode(target)
    member.mode = stat.S_IMODE(item.info.st_mode)
    member.uid = member.gid = 1000
    seconds, nanos = divmod(max(0, item.info.st_mtime_ns), 10**9)
    member.mtime = seconds
    member.pax_headers = {
        attribute_key(name): os.fsdecode(value) for name, value in told(attributes)
    }
    if nanos:
        member.pax_headers["mtime"] = f"{seconds}.{nanos:09d}"
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def unpack(source: Source, layer: LayerFolder, *, most_bytes: int) -> None:
    """Blocks. Raises InvalidError, TooLargeError, OSError; then it is half written."""
    tar = Tar(source)
    total = 0
    for member in tar:
        path = _place(member)
        if path is None:
            continue
        total += member.size
        if total > most_bytes:  # holes count here: they travel as zeros
            raise _too_large(most_bytes)
        match member.kind:
            case Kind.DIR:
                layer.folder(path, member.mode, member.mtime_ns)
            case Kind.FILE:
                _write_file(layer, path, member, tar)
            case Kind.SYMLINK:
                layer.symlink(path, member.target, member.mtime_ns)
            case Kind.HARDLINK:
                layer.hardlink(path, _hard_target(member))
            case _:
                raise InvalidError(f"archive has a device or FIFO: {shown(member.path)}")
    while rest := source.read(_CHUNK):
        if rest.strip(b"\0"):
            raise InvalidError("archive goes on after its end")


def _write_file(layer: LayerFolder, path: bytes, member: Member, tar: Tar) -> None:
    noted = pack(member.attributes)
    layer.begin_file(path, member.mode, member.mtime_ns, member.size, noted)
    offset = 0
    for chunk in tar.data():
        if chunk.count(0) < len(chunk):
            layer.write(offset, chunk)
        offset += len(chunk)
    layer.end_file()


def _place(member: Member) -> bytes | None:
    """Where a layer has it; None: it says no more than that there are places."""
    path = _within(member.path.removesuffix(b"/") if member.kind is Kind.DIR else member.path)
    if path in (b"var", b"") and member.kind is Kind.DIR:
        return None
    place = _in_layer(path)
    if b"/" not in place and member.kind is not Kind.DIR:
        raise InvalidError(f"archive replaces a folder that each sandbox has: {shown(member.path)}")
    return place


def _hard_target(member: Member) -> bytes:
    return _in_layer(_within(member.target))


def _within(name: bytes) -> bytes:
    if name + b"/" == ARCHIVED:
        return b""
    if not name.startswith(ARCHIVED):
        raise InvalidError(f"archive has a name outside of {ARCHIVED.decode()}: {shown(name)}")
    return name.removeprefix(ARCHIVED)


def _in_layer(path: bytes) -> bytes:
    for name, place in PLACES.items():
        beyond = b"/" + path + b"/"
        if beyond.startswith(place + b"/"):
            return (name + b"/" + beyond[len(place) + 1 :]).removesuffix(b"/")
    raise InvalidError(
        f"archive has a file that no sandbox could have written: {shown(path)}",
        hint="the local provider keeps /workspace, /root, /tmp and /var/tmp",
    )


def _too_large(most: int) -> TooLargeError:
    return TooLargeError(
        f"the snapshot's files have more than {most} bytes, holes counted",
        hint="remove files in the sandbox, or raise the server's max_snapshot",
        limit=most,
    )


def _closed(path: bytes) -> ForbiddenError:
    return ForbiddenError(
        f"the snapshot has something that its own user may not read: {shown(path)}",
        hint="change its mode in a sandbox and take the snapshot again, or run the server as root",
    )
