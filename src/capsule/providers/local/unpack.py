"""Write the members of an untrusted layer into a folder, by descriptors, following nothing.

Rules, all of them enforced here:
- A path is relative to the layer's root (a leading / is dropped); `..` is refused. Parents are
  opened one by one with O_NOFOLLOW: a member behind a link that an earlier one planted is refused.
- Files are created with O_EXCL; what is in the way is removed first, so nothing is ever written
  through a link. Hard links lead to members of the same layer, by the same walk.
- Everything belongs to the user who imports (root: root). Permission bits are kept as they are;
  set-uid, set-gid and sticky are dropped, as are extended attributes and owners. Devices, FIFOs
  and sockets are left out. The root itself is always 0755, or no box could start from it.
- Bytes, entries, depth and the length of names have caps, counted over the whole image.

A deletion of something in a lower layer ("whiteout", `.wh.name`) becomes what overlayfs takes for
it: a character device 0:0, which ordinary users may make since Linux 5.8. `.wh..wh..opq` becomes
the attribute `user.overlay.opaque` (read when mounted with `userxattr`, as it must be in a user
namespace), and `trusted.overlay.opaque` beside it when root imports. Where these cannot be made,
layers are flattened: all are written into one folder, and deletions are carried out.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from capsule.errors import InvalidError, TooLargeError
from capsule.model import GIB
from capsule.providers.local.removal import remove_entry
from capsule.providers.local.tarball import Kind, Member, Tar, shown

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WHITEOUT = b".wh."
_META = b".wh..wh."
_OPAQUE = b".wh..wh..opq"
_OPAQUE_ATTRIBUTES = ("user.overlay.opaque", "trusted.overlay.opaque")

Parts = tuple[bytes, ...]  # a path, split


@dataclass(frozen=True, slots=True)
class Caps:
    """What one image may be. Beyond it an archive is a bomb or a mistake."""

    bytes: int = 32 * GIB
    entries: int = 1_000_000
    depth: int = 128
    name: int = 255
    path: int = 4095
    layers: int = 128
    json: int = 4 * 1024 * 1024


@dataclass(slots=True)
class Tally:
    """Counted over all layers of an image."""

    caps: Caps
    bytes: int = 0
    entries: int = 0
    left_out: int = 0  # devices and FIFOs

    def add_entry(self) -> None:
        self.entries += 1
        if self.entries > self.caps.entries:
            raise TooLargeError(
                f"image has more than {self.caps.entries} files and folders",
                limit=self.caps.entries,
            )

    def add_bytes(self, count: int) -> None:
        self.bytes += count
        if self.bytes > self.caps.bytes:
            raise TooLargeError(
                f"image unpacks to more than {self.caps.bytes} bytes", limit=self.caps.bytes
            )


@dataclass(slots=True)
class LayerWriter:
    """Writes a layer into the folder `root` (an open descriptor, owned by the caller).

    With `flatten`, `write` is called once per layer, the lowest first, and deletions are carried
    out. `finish` comes last: then modes and times of folders are set.
    """

    root: int
    tally: Tally
    flatten: bool = False
    # Mode and time of each folder; None: a parent that the archive did not mention.
    _folders: dict[Parts, tuple[int, int] | None] = field(default_factory=dict)
    _written: set[Parts] = field(default_factory=set)  # by the current layer, if we flatten
    _last: tuple[Parts, int] | None = None  # the folder opened last, and its descriptor

    def write(self, tar: Tar) -> None:
        self._written.clear()
        try:
            for member in tar:
                self._apply(member, tar)
        finally:
            self._forget_last()

    def finish(self) -> None:
        try:
            # The deepest first: a folder may end up without the right to enter it.
            for parts in sorted(self._folders, key=len, reverse=True):
                self._finish_folder(parts, self._folders[parts])
            os.fchmod(self.root, 0o755)
        finally:
            self._forget_last()

    def _apply(self, member: Member, tar: Tar) -> None:
        parts = self._split(member.path)
        if not parts:
            if member.kind is not Kind.DIR:
                raise InvalidError("archive member replaces the root itself")
            return
        name = parts[-1]
        if any(part.startswith(_WHITEOUT) for part in parts[:-1]):
            raise InvalidError(f"archive member lies in a deleted folder: {shown(member.path)}")
        if name.startswith(_WHITEOUT):
            self._whiteout(parts)
        elif member.kind is Kind.OTHER:
            self.tally.left_out += 1
        else:
            self._create(member, parts, tar)

    def _create(self, member: Member, parts: Parts, tar: Tar) -> None:
        parent, name = self._open(parts[:-1]), parts[-1]
        if self.flatten:
            self._written.update(parts[:end] for end in range(1, len(parts) + 1))
        if member.kind is Kind.DIR:
            self._make_folder(parent, name, parts)
            self._folders[parts] = (member.mode, member.mtime_ns)
            return
        self.tally.add_entry()
        self._clear(parent, name)
        match member.kind:
            case Kind.FILE:
                self._make_file(parent, name, member, tar)
            case Kind.SYMLINK:
                self._make_symlink(parent, name, member)
            case _:
                self._make_hardlink(parent, name, member)

    def _make_file(self, parent: int, name: bytes, member: Member, tar: Tar) -> None:
        self.tally.add_bytes(member.size)
        fd = os.open(name, _NEW, 0o600, dir_fd=parent)
        try:
            for chunk in tar.data():
                _write_all(fd, chunk)
            os.fchmod(fd, member.mode & 0o777)
            os.utime(fd, ns=(member.mtime_ns, member.mtime_ns))
        finally:
            os.close(fd)

    def _make_symlink(self, parent: int, name: bytes, member: Member) -> None:
        if not 0 < len(member.target) <= self.tally.caps.path:
            raise InvalidError(f"archive has a link to nowhere: {shown(member.path)}")
        os.symlink(member.target, name, dir_fd=parent)
        times = (member.mtime_ns, member.mtime_ns)
        os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)

    def _make_hardlink(self, parent: int, name: bytes, member: Member) -> None:
        *folders, source = self._split(member.target) or (b"",)
        if not source:
            raise InvalidError(f"archive has a hard link to its root: {shown(member.path)}")
        origin = os.dup(parent)  # `_open` below may close it
        try:
            place = self._open(tuple(folders), create=False)
            mode = os.stat(source, dir_fd=place, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                raise InvalidError(f"archive has a hard link to no file: {shown(member.path)}")
            os.link(source, name, src_dir_fd=place, dst_dir_fd=origin, follow_symlinks=False)
        except FileNotFoundError:
            raise InvalidError(
                f"archive has a hard link to a missing file: {shown(member.path)}"
            ) from None
        finally:
            os.close(origin)

    def _make_folder(self, parent: int, name: bytes, parts: Parts) -> None:
        """Mode and time are set at the end, when nothing is written into it any more."""
        hides = False
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                return
            hides = is_deleted(found)  # below, and made anew here
            self._clear(parent, name)
        except FileNotFoundError:
            pass
        self.tally.add_entry()
        os.mkdir(name, 0o700, dir_fd=parent)
        self._folders.setdefault(parts, None)
        if hides:
            self._set_opaque(parent, name)

    def _open(self, parts: Parts, *, create: bool = True) -> int:
        """A descriptor of the folder `parts`, good until the next call. Follows no link."""
        if self._last is not None and self._last[0] == parts:
            return self._last[1]
        self._forget_last()
        fd = os.dup(self.root)
        try:
            for depth, part in enumerate(parts, 1):
                if create and not _is_folder(fd, part):
                    self._make_folder_beneath(fd, part, parts[:depth])
                inner = os.open(part, _DIR, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise InvalidError(
                    f"archive member lies behind a link or a file: {shown(b'/'.join(parts))}"
                ) from None
            raise
        self._last = (parts, fd)
        return fd

    def _make_folder_beneath(self, fd: int, part: bytes, parts: Parts) -> None:
        """A parent that the archive did not mention (yet)."""
        found = _stat(fd, part)
        if found is not None and not is_deleted(found):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        self._make_folder(fd, part, parts)

    def _clear(self, parent: int, name: bytes) -> None:
        """Later members replace earlier ones."""
        with suppress(FileNotFoundError):
            remove_entry(parent, name)

    def _whiteout(self, parts: Parts) -> None:
        name = parts[-1]
        if name == _OPAQUE:
            self._hide_all(parts[:-1])
            return
        if name.startswith(_META):
            return  # bookkeeping of aufs
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in (b"", b".", b".."):
            raise InvalidError(f"archive deletes a path that cannot be: {shown(b'/'.join(parts))}")
        parent, target = self._open(parts[:-1]), (*parts[:-1], hidden)
        found = _stat(parent, hidden)
        if self.flatten:
            if target not in self._written:
                self._clear(parent, hidden)
        elif found is None:
            self.tally.add_entry()
            os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
        elif stat.S_ISDIR(found.st_mode):
            self._set_opaque(parent, hidden)

    def _hide_all(self, parts: Parts) -> None:
        """Nothing of the layers below is seen in this folder."""
        if self.flatten:
            self._erase_below(parts)
        else:
            set_opaque(self._open(parts))

    def _erase_below(self, parts: Parts) -> None:
        todo = [parts]
        while todo:
            place = todo.pop()
            fd = self._open(place)
            for name in map(os.fsencode, os.listdir(fd)):
                inner = (*place, name)
                if inner not in self._written:
                    self._clear(fd, name)
                elif _is_folder(fd, name):
                    todo.append(inner)

    def _set_opaque(self, parent: int, name: bytes) -> None:
        fd = os.open(name, _DIR, dir_fd=parent)
        try:
            set_opaque(fd)
        finally:
            os.close(fd)

    def _finish_folder(self, parts: Parts, known: tuple[int, int] | None) -> None:
        with suppress(FileNotFoundError, InvalidError):  # replaced by something else since
            fd = self._open(parts, create=False)
            os.fchmod(fd, 0o755 if known is None else known[0] & 0o777)
            if known is not None:
                os.utime(fd, ns=(known[1], known[1]))

    def _forget_last(self) -> None:
        if self._last is not None:
            os.close(self._last[1])
            self._last = None

    def _split(self, path: bytes) -> Parts:
        caps = self.tally.caps
        parts = tuple(part for part in path.split(b"/") if part not in (b"", b"."))
        if b".." in parts:
            raise InvalidError(f"archive member leaves its root: {shown(path)}")
        if len(parts) > caps.depth:
            raise TooLargeError(f"archive member is over {caps.depth} folders deep: {shown(path)}")
        if len(path) > caps.path or any(len(part) > caps.name for part in parts):
            raise TooLargeError(f"archive member has too long a name: {shown(path)}")
        return parts


def set_opaque(fd: int) -> None:
    os.setxattr(fd, _OPAQUE_ATTRIBUTES[0], b"y")
    with suppress(PermissionError):  # only root's
        os.setxattr(fd, _OPAQUE_ATTRIBUTES[1], b"y")


def is_opaque(path: Path | int) -> bool:
    """Overlayfs does not look for the attribute at the root of a layer: whoever mounts must."""
    try:
        return os.getxattr(path, _OPAQUE_ATTRIBUTES[0]) == b"y"
    except OSError:
        return False


def is_deleted(found: os.stat_result | os.DirEntry[str]) -> bool:
    """Whether a layer has it to say that those below show nothing of this name."""
    if isinstance(found, os.DirEntry):
        if (
            found.is_file(follow_symlinks=False)
            or found.is_dir(follow_symlinks=False)
            or found.is_symlink()
        ):
            return False  # which came with its name: nobody looks at the file
        found = found.stat(follow_symlinks=False)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def whiteouts_work(folder: int) -> bool:
    """Whether deletions can be expressed here for overlayfs, tried in an open, empty folder."""
    try:
        os.mknod(b"probe", stat.S_IFCHR, os.makedev(0, 0), dir_fd=folder)
        os.unlink(b"probe", dir_fd=folder)
        set_opaque(folder)
    except OSError:
        return False
    return True


def _write_all(fd: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(fd, view) :]


def _stat(parent: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_folder(parent: int, name: bytes) -> bool:
    found = _stat(parent, name)
    return found is not None and stat.S_ISDIR(found.st_mode)
