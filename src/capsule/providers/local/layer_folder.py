"""Write a layer into a folder, by descriptors, following nothing: whoever wrote the stream may have
been hostile.

A path is made of plain names; parents are opened one by one with O_NOFOLLOW, and must have come
before. Files are made with O_EXCL. Set-uid and set-gid are dropped, as are owners: all that a box
writes belongs to its one user. Deletions are what overlayfs takes for them (see `unpack`). Modes of
folders are set when they are left: one may end up closed to ourselves.
"""

from __future__ import annotations

import errno
import os
import stat
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from capsule.errors import InvalidError, TooLargeError
from capsule.providers.local.layer_attributes import give
from capsule.providers.local.seen_folders import place_of
from capsule.providers.local.tarball import shown
from capsule.providers.local.unpack import set_opaque

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 256
MAX_ENTRIES = 2_000_000

Parts = tuple[bytes, ...]


@dataclass(slots=True)
class _Open:
    """A folder on the way to where we write, and what is due when it is left."""

    name: bytes
    fd: int
    mode: int | None
    mtime_ns: int
    seen: bool = False  # in the layer before, too, at the same place


class LayerFolder:
    """`root` is an open, empty folder, the caller's. `owner`: None keeps whoever writes. `least`:
    what every mode has of the owner's rights. `seen`: the folders of the layer before."""

    def __init__(
        self,
        root: int,
        *,
        most_bytes: int,
        owner: int | None,
        before: Sequence[int] = (),
        seen: Collection[int] = (),
        least: int = 0,
    ) -> None:
        self.bytes = 0  # written
        self.places: array[int] = array("q")  # of its folders (`seen_folders`)
        self._seen = seen
        self.taken = 0  # bytes of files that an earlier layer has as well
        self._before = [_Way(fd) for fd in before]  # such layers, open, topmost first; the caller's
        self._several: set[int] = set()  # files taken that have other names
        self.entries = 0
        self._root = root
        self._most = most_bytes
        self._least = least
        self._owner = owner
        self._open: list[_Open] = []
        self._file = -1
        self._left = 0  # of the file's size, that extents may reach to

    def folder(
        self, path: bytes, mode: int, mtime_ns: int, *, opaque: bool = False, inode: int = 0
    ) -> None:
        """`inode`: which one it is in its box; 0: an older agent does not tell."""
        parts = self._new(path)
        parent = self._enter(parts[:-1])
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
        except FileExistsError:
            raise _twice(path) from None
        fd = os.open(parts[-1], _DIR, dir_fd=parent)
        seen = not inode or self.place(path, inode, opaque=opaque) in self._seen
        self._open.append(_Open(parts[-1], fd, mode & 0o1777 | self._least, mtime_ns, seen))
        if opaque:
            set_opaque(fd)

    def place(self, path: bytes, inode: int, *, opaque: bool) -> int:
        place = place_of(path, inode, opaque=opaque)
        self.places.append(place)
        return place

    def begin_file(
        self, path: bytes, mode: int, mtime_ns: int, size: int, attributes: bytes = b""
    ) -> None:
        """Then `write` as often as needed, then `end_file`. `attributes`: see there."""
        parts = self._new(path)
        self.bytes += len(attributes)
        if max(size, self.bytes) > self._most:
            raise self._too_large()
        try:
            self._file = os.open(parts[-1], _NEW, 0o600, dir_fd=self._enter(parts[:-1]))
        except FileExistsError:
            raise _twice(path) from None
        give(self._file, attributes)
        os.ftruncate(self._file, size)
        self._left = size
        self._finish = (mode & 0o777 | self._least & 0o600, mtime_ns)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.bytes += len(data)
        if self.bytes > self._most:
            raise self._too_large()
        if offset + len(data) > self._left:
            raise InvalidError("the layer has a file with more content than its size")
        view = memoryview(data)
        while view:
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done

    def end_file(self) -> None:
        fd, self._file = self._file, -1
        mode, mtime_ns = self._finish
        try:
            if self._owner is not None:
                os.fchown(fd, self._owner, self._owner)
            os.fchmod(fd, mode)
            os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)

    def symlink(self, path: bytes, target: bytes, mtime_ns: int) -> None:
        parts = self._new(path)
        if not 0 < len(target) < 4096 or b"\0" in target:
            raise InvalidError(f"the layer has a link to nowhere: {shown(path)}")
        parent = self._enter(parts[:-1])
        try:
            os.symlink(target, parts[-1], dir_fd=parent)
        except FileExistsError:
            raise _twice(path) from None
        if self._owner is not None:
            os.chown(parts[-1], self._owner, self._owner, dir_fd=parent, follow_symlinks=False)
        os.utime(parts[-1], ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)

    def hardlink(self, path: bytes, target: bytes) -> None:
        """To a file of the same layer that came before."""
        parts, source = self._new(path), split(target)
        place = self._walk(source[:-1])
        try:
            if not stat.S_ISREG(os.stat(source[-1], dir_fd=place, follow_symlinks=False).st_mode):
                raise InvalidError(f"the layer has a hard link to no file: {shown(path)}")
            _link(source[-1], place, path, self._enter(parts[:-1]))
        except FileNotFoundError:
            raise InvalidError(
                f"the layer has a hard link to a missing file: {shown(path)}"
            ) from None
        finally:
            os.close(place)

    def unchanged(self, path: bytes) -> None:
        """A file that the layers before have: the same, under a further name. Its own times do not
        tell that a folder above it was renamed: it may be another than is there at its path."""
        parts = self._new(path)
        if not self._before:
            raise InvalidError(f"the layer has an unchanged file and none before: {shown(path)}")
        parent = self._enter(parts[:-1])
        if not self._open or not self._open[-1].seen:
            raise InvalidError(f"the layer before had another folder here: {shown(path)}")
        found = next(filter(None, (way.find(parts) for way in self._before)), None)
        if found is None or not stat.S_ISREG(found.info.st_mode):
            raise InvalidError(f"the layer before has no such file: {shown(path)}")
        _link(parts[-1], found.folder, path, parent)
        self.taken += content_of(found.info)

    def take(self, path: bytes, folder: int) -> None:
        """The file, link or deletion of the same name that an open folder of another layer has,
        under a further name."""
        parts = self._new(path)
        info = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
        _link(parts[-1], folder, path, self._enter(parts[:-1]))
        if stat.S_ISREG(info.st_mode) and info.st_ino not in self._several:
            self.taken += content_of(info)
            if info.st_nlink > 1:  # of any layer: it may come again
                self._several.add(info.st_ino)

    def whiteout(self, path: bytes) -> None:
        parts = self._new(path)
        try:
            os.mknod(parts[-1], stat.S_IFCHR, os.makedev(0, 0), dir_fd=self._enter(parts[:-1]))
        except FileExistsError:
            raise _twice(path) from None

    def finish(self) -> None:
        if self._file >= 0:
            raise InvalidError("the layer ends in the middle of a file")
        self._leave(0)
        self._leave_before()

    def close(self) -> None:
        """After a failure: lets go of what is open. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        while self._open:
            os.close(self._open.pop().fd)
        self._leave_before()

    def _leave_before(self) -> None:
        for way in self._before:
            way.leave()

    def _new(self, path: bytes) -> Parts:
        self.entries += 1
        if self.entries > MAX_ENTRIES:
            raise TooLargeError(f"the layer has more than {MAX_ENTRIES} files", limit=MAX_ENTRIES)
        return split(path)

    def _enter(self, parts: Sequence[bytes]) -> int:
        """The folder's descriptor, good until the next call. Folders that are not on the way to it
        are left for good."""
        same = 0
        for name, held in zip(parts, self._open, strict=False):
            if name != held.name:
                break
            same += 1
        self._leave(same)
        for name in parts[same:]:
            fd = _open_dir(name, self._top())
            self._open.append(_Open(name, fd, None, 0))
        return self._top()

    def _top(self) -> int:
        return self._open[-1].fd if self._open else self._root

    def _leave(self, depth: int) -> None:
        while len(self._open) > depth:
            held = self._open.pop()
            try:
                if held.mode is not None:
                    if self._owner is not None:
                        os.fchown(held.fd, self._owner, self._owner)
                    os.fchmod(held.fd, held.mode)
                    os.utime(held.fd, ns=(held.mtime_ns, held.mtime_ns))
            finally:
                os.close(held.fd)

    def _walk(self, parts: Sequence[bytes]) -> int:
        """The same with a descriptor of its own, the caller's; leaves nothing."""
        fd = os.dup(self._root)
        for name in parts:
            try:
                inner = _open_dir(name, fd)
            finally:
                os.close(fd)
            fd = inner
        return fd

    def _too_large(self) -> TooLargeError:
        return TooLargeError(
            f"the snapshot has more than {self._most} bytes",
            hint="remove files in the sandbox, or raise the server's max_snapshot",
            limit=self._most,
        )


def content_of(info: os.stat_result) -> int:
    """Bytes of a file without its holes, which a layer does not count when it writes one."""
    return min(info.st_size, info.st_blocks * 512)


def split(path: bytes) -> Parts:
    """Raises InvalidError (it leads elsewhere), TooLargeError."""
    parts = tuple(path.split(b"/"))
    if any(part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 for part in parts):
        raise InvalidError(f"the layer has a path that cannot be: {shown(path)}")
    if len(parts) > MAX_DEPTH or len(path) > 4095:
        raise TooLargeError(f"the layer has a path that is too deep or long: {shown(path)}")
    return parts


class _Found(NamedTuple):
    folder: int  # good until the next is looked for
    info: os.stat_result


class _Way:
    """The folders down to where files were last looked for: mostly the next one is beside them."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._folders: list[tuple[bytes, int]] = []

    def find(self, parts: Sequence[bytes]) -> _Found | None:
        try:
            folder = self._enter(parts[:-1])
            return _Found(folder, os.stat(parts[-1], dir_fd=folder, follow_symlinks=False))
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EACCES):
                return None
            raise

    def _enter(self, parts: Sequence[bytes]) -> int:
        same = 0
        for name, (held, _) in zip(parts, self._folders, strict=False):
            if name != held:
                break
            same += 1
        self.leave(same)
        for name in parts[same:]:
            self._folders.append((name, os.open(name, _DIR, dir_fd=self._top())))
        return self._top()

    def leave(self, depth: int = 0) -> None:
        while len(self._folders) > depth:
            os.close(self._folders.pop()[1])

    def _top(self) -> int:
        return self._folders[-1][1] if self._folders else self._root


def _open_dir(name: bytes, parent: int) -> int:
    try:
        return os.open(name, _DIR, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EACCES):
            text = f"the layer has a file in no folder of its own: {shown(name)}"
            raise InvalidError(text) from None
        raise


def _link(name: bytes, folder: int, path: bytes, parent: int) -> None:
    """What an open folder has as `name` gets the further name that `path` ends with."""
    fresh = path.rpartition(b"/")[2]
    try:
        os.link(name, fresh, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
    except FileExistsError:
        raise _twice(path) from None
    except OSError as error:
        if error.errno == errno.EMLINK:  # 65,000 on ext4
            text = f"the layer before has a file with too many names: {shown(path)}"
            raise InvalidError(text) from None
        raise


def _twice(path: bytes) -> InvalidError:
    return InvalidError(f"the layer has something twice: {shown(path)}")
