"""An image archive as a file with an index: members are looked up by name, layers read as streams.

Names in an archive are only ever keys of the index, never paths on this machine. What has a digest
is checked against it: JSON at once, a layer while it is read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import posixpath
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from capsule.errors import InvalidError, NotSupportedError, TooLargeError
from capsule.providers.local.tarball import Kind, Source, Tar
from capsule.providers.local.unpack import Caps

_CHUNK = 1024 * 1024
_MOST_INDEXED = 20_000  # members; an archive with more is a root file system, not an image
_MOST_LINKS = 4
_NAMED_BY_DIGEST = re.compile(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?", re.ASCII)
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}


class Extent(NamedTuple):
    """Where a member's data lies in the archive."""

    offset: int
    size: int


class Layer(NamedTuple):
    extent: Extent
    digest: str | None = None  # of the bytes in the archive, in hex
    diff_id: str | None = None  # of the unpacked tar, in hex


class Slice:
    """A part of a file, read as a stream."""

    def __init__(self, fd: int, extent: Extent) -> None:
        self._fd, self._at, self._end = fd, extent.offset, extent.offset + extent.size

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._fd, max(0, min(size, self._end - self._at)), self._at)
        self._at += len(data)
        return data

    def seek_forward(self, count: int) -> None:
        self._at += count


class Hashed:
    """Passes bytes on, at most `limit` of them, and knows their SHA-256 at the end."""

    def __init__(self, source: Source, limit: int) -> None:
        self._source, self._limit = source, limit
        self._hash = hashlib.sha256()
        self._count = 0

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        self._count += len(data)
        if self._count > self._limit:
            raise TooLargeError(f"image unpacks to more than {self._limit} bytes")
        return data

    def drain(self) -> str:
        """Read to the end and return the digest."""
        while self.read(_CHUNK):
            pass
        return self._hash.hexdigest()


class Archive:
    """An open archive, uncompressed and seekable. The descriptor stays the caller's."""

    def __init__(self, fd: int, caps: Caps) -> None:
        self._fd = fd
        self.caps = caps
        self.size = os.fstat(fd).st_size
        self._index: dict[str, Extent | str] = {}  # str: a link, and where it leads
        self._build_index()

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def find(self, name: str) -> Extent:
        """Raises InvalidError when the archive does not have it."""
        found: Extent | str | None = posixpath.normpath(name)
        for _ in range(_MOST_LINKS):
            if not isinstance(found, str):
                break
            found = self._index.get(found)
        if not isinstance(found, Extent):
            raise InvalidError(
                f"image archive is incomplete: it names {name[:200]!r} and does not have it",
                hint="save the image again, for this machine's platform",
            )
        return found

    def layer(self, name: str, diff_id: str | None) -> Layer:
        return Layer(self.find(name), digest_in(name), diff_id)

    def document(self, name: str) -> bytes:
        """A small file, of the digest that its name says, if it says one."""
        extent = self.find(name)
        if extent.size > self.caps.json:
            raise TooLargeError(f"{name} in the image archive is over {self.caps.json} bytes")
        data = Slice(self._fd, extent).read(extent.size)
        _compare(name, hashlib.sha256(data).hexdigest(), digest_in(name))
        return data

    def raw(self, extent: Extent) -> Iterator[bytes]:
        """The bytes of a member, as they are in the archive."""
        part = Slice(self._fd, extent)
        return iter(lambda: part.read(_CHUNK), b"")

    def json(self, name: str) -> Any:
        data = self.document(name)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidError(f"{name} in the image archive is not JSON: {error}") from error

    @contextmanager
    def open_layer(self, layer: Layer) -> Iterator[Hashed]:
        """The layer's tar. At the end of the block it is read to its end, and its digests hold."""
        raw = Hashed(Slice(self._fd, layer.extent), layer.extent.size)
        packed = _compression(os.pread(self._fd, 8, layer.extent.offset), "a layer")
        # GzipFile wants a file, and uses nothing but its read().
        unpacked = gzip.GzipFile(fileobj=cast(IO[bytes], raw)) if packed else raw
        # Headers and padding of the smallest files come on top of what the files hold.
        plain = Hashed(unpacked, self.caps.bytes + 2048 * self.caps.entries)
        with damaged_data("a layer of the image"):
            yield plain
            diff_id, digest = plain.drain(), raw.drain()
        _compare("a layer's archive", digest, layer.digest)
        _compare("a layer's content", diff_id, layer.diff_id)

    def digest(self, layer: Layer) -> str:
        """The digest of the layer's unpacked tar."""
        with self.open_layer(layer) as tar:
            return tar.drain()

    def _build_index(self) -> None:
        source = Slice(self._fd, Extent(0, self.size))
        tar = Tar(source, source.seek_forward)
        for count, member in enumerate(tar):
            if count >= _MOST_INDEXED:
                self._index.clear()
                return
            name = posixpath.normpath(os.fsdecode(member.path).lstrip("/"))
            target = os.fsdecode(member.target)
            if member.kind is Kind.FILE:
                self._index[name] = Extent(tar.position, member.size)
            elif member.kind is Kind.HARDLINK:
                self._index[name] = posixpath.normpath(target.lstrip("/"))
            elif member.kind is Kind.SYMLINK:  # old `docker save` links equal layers
                self._index[name] = posixpath.normpath(
                    posixpath.join(posixpath.dirname(name), target)
                )


@contextmanager
def opened(source: Path | BinaryIO, spool: Path, caps: Caps) -> Iterator[Archive]:
    """An archive from anywhere. What is compressed or not a file is copied to `spool` first."""
    with open(source, "rb") if isinstance(source, Path) else _kept_open(source) as stream:
        head = stream.read(8)
        packed = _compression(head, "the archive")
        if isinstance(source, Path) and not packed and stream.seekable():
            yield Archive(stream.fileno(), caps)
            return
        raw = _Prefixed(head, stream)
        plain = gzip.GzipFile(fileobj=cast(IO[bytes], raw)) if packed else raw
        with open(spool, "xb+") as copy:
            limited = Hashed(plain, 2 * caps.bytes)
            with damaged_data("the archive"):
                while chunk := limited.read(_CHUNK):
                    copy.write(chunk)
            copy.flush()
            yield Archive(copy.fileno(), caps)


class _Prefixed:
    """A stream of which the first bytes were read already."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int, /) -> bytes:
        if not self._head:
            return self._stream.read(size)
        data, self._head = self._head[:size], self._head[size:]
        return data


@contextmanager
def _kept_open(stream: BinaryIO) -> Iterator[BinaryIO]:
    yield stream


@contextmanager
def damaged_data(what: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidError(f"{what} is damaged: {error}", hint="make or fetch it again") from error


def digest_in(name: str) -> str | None:
    """The digest that a name in an archive promises."""
    found = _NAMED_BY_DIGEST.fullmatch(name)
    return found[1] if found else None


def _compare(what: str, actual: str, promised: str | None) -> None:
    if promised is not None and actual != promised:
        raise InvalidError(
            f"{what} does not have its digest: sha256 is {actual}, not {promised}",
            hint="make or fetch the archive again",
        )


def _compression(head: bytes, what: str) -> bool:
    name = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if name not in (None, "gzip"):
        raise NotSupportedError(
            f"{what} is compressed with {name}, which is not supported",
            hint="use gzip or no compression, e.g. `docker save IMAGE > image.tar`",
        )
    return name is not None
