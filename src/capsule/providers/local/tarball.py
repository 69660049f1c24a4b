"""Tar archives of strangers, read as a stream: every number checked, nothing followed.

Not the standard library's `tarfile`: it reads whole extended headers into memory whatever size
they claim, and its filters have been bypassed. Known here are ustar, pax and GNU long names, which
is what Docker, Podman, BuildKit and GNU tar write. Sparse files are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

from capsule.errors import InvalidError

BLOCK = 512
_MAX_EXTENDED = 1024 * 1024  # of a member's pax and long-name headers
_CHUNK = 256 * 1024
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")
_PAX_TIME = re.compile(rb"(-?[0-9]{1,12})(?:\.([0-9]{0,9})[0-9]*)?")
_MAX_SIZE = 2**60
_USED = frozenset({b"path", b"linkpath", b"size", b"mtime"})
_SPARSE = b"GNU.sparse."
_UNFIT = re.compile("[%=\udc80-\udcff]")  # in the name of an attribute
_ATTRIBUTE = "SCHILY.xattr."  # as GNU tar, bsdtar and Docker have it


class Kind(Enum):
    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"
    OTHER = "other"  # devices and FIFOs


_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"7": Kind.FILE,
    b"1": Kind.HARDLINK,
    b"2": Kind.SYMLINK,
    b"3": Kind.OTHER,
    b"4": Kind.OTHER,
    b"5": Kind.DIR,
    b"6": Kind.OTHER,
}


class Member(NamedTuple):
    path: bytes  # as written; not to be trusted
    kind: Kind
    mode: int
    size: int  # 0 for everything but files
    mtime_ns: int
    target: bytes  # of links
    attributes: tuple[tuple[bytes, bytes], ...] = ()  # names and values; not to be trusted


class Source(Protocol):
    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; b"" at the end."""


class Tar:
    """Iterate over the members; between two steps `data` gives the content of the last one."""

    def __init__(self, source: Source, seek: Callable[[int], None] | None = None) -> None:
        """`seek` moves the source forward without reading, if it can do that."""
        self._source = source
        self._seek = seek
        self.position = 0  # of the next unread byte; right after a member was yielded: of its data
        self._left = 0  # bytes of the member's data, padding included, that are not read yet
        self._size = 0
        self._extended = 0  # bytes of headers about the next member

    def __iter__(self) -> Iterator[Member]:
        pax: dict[bytes, bytes] = {}
        shared: dict[bytes, bytes] = {}
        while True:
            self.skip()
            header = self._exactly(BLOCK)
            if not header.strip(b"\0"):
                return
            _verify(header)
            kind, size = header[156:157], _number(header[124:136], "size")
            if kind in b"xgLK" and kind:
                self._extend(kind, size, pax, shared)
                continue
            member = _member(header, kind, size, {**shared, **pax})
            pax, self._extended = {}, 0
            self._size = member.size
            self._left = -(-member.size // BLOCK) * BLOCK
            yield member

    def data(self) -> Iterator[bytes]:
        """The content of the current file. What is not read is skipped."""
        while self._size:
            chunk = self._exactly(min(_CHUNK, self._size))
            self._size -= len(chunk)
            self._left -= len(chunk)
            yield chunk

    def skip(self) -> None:
        """Go to the end of the current member."""
        if self._seek is not None:
            self._seek(self._left)
            self.position += self._left
            self._left = 0
        while self._left:
            self._left -= len(self._exactly(min(_CHUNK, self._left)))
        self._size = 0

    def _extend(
        self, kind: bytes, size: int, pax: dict[bytes, bytes], shared: dict[bytes, bytes]
    ) -> None:
        """A header about the next member (`g`: about all that follow)."""
        self._extended += size
        if self._extended > _MAX_EXTENDED:
            raise InvalidError(
                f"archive has an extended header of {self._extended} bytes, limit {_MAX_EXTENDED}"
            )
        body = self._exactly(-(-size // BLOCK) * BLOCK)[:size]
        if kind == b"L":
            pax.setdefault(b"path", body.rstrip(b"\0"))
        elif kind == b"K":
            pax.setdefault(b"linkpath", body.rstrip(b"\0"))
        else:
            (shared if kind == b"g" else pax).update(_used(_pax_records(body), kind))

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:
            part = self._source.read(missing)
            if not part:
                raise InvalidError(
                    f"archive is cut off at byte {self.position}", hint="make or fetch it again"
                )
            parts.append(part)
            missing -= len(part)
            self.position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _verify(header: bytes) -> None:
    claimed = _number(header[148:156], "checksum")
    plain = header[:148] + b" " * 8 + header[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in plain)  # what old tars computed
    if claimed not in (sum(plain), signed):
        raise InvalidError("archive is damaged, or not a tar: a header's checksum is wrong")


def _member(header: bytes, kind: bytes, size: int, pax: dict[bytes, bytes]) -> Member:
    path = _text(header[0:100])
    if header[257:263] == b"ustar\0" and header[345]:
        path = _text(header[345:500]) + b"/" + path
    path = pax.get(b"path", path)
    if kind not in _KINDS or _SPARSE in pax:
        what = "sparse" if kind == b"S" or kind in _KINDS else f"of type {kind!r}"
        raise InvalidError(
            f"archive member is {what}, which is not supported: {shown(path)}",
            hint="pack it again without that feature",
        )
    known = _KINDS[kind]
    if kind == b"\0" and path.endswith(b"/"):
        known = Kind.DIR  # as tars before 1988 say it
    if b"size" in pax:
        size = _decimal(pax[b"size"])
    target = pax.get(b"linkpath", _text(header[157:257]))
    if b"\0" in path or b"\0" in target:
        raise InvalidError(f"archive member has a NUL byte in its name: {shown(path)}")
    return Member(
        path=path,
        kind=known,
        mode=_number(header[100:108], "mode") & 0o7777,
        size=size if known is Kind.FILE else 0,
        mtime_ns=_time(pax.get(b"mtime"), header[136:148]),
        target=target,
        attributes=tuple(_attributes(pax)),
    )


def attribute_key(name: str) -> str:
    """What an extended attribute is called in a pax header. As GNU tar has it, and for names that
    are no UTF-8, too."""
    return _ATTRIBUTE + _UNFIT.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", name)


def _attributes(pax: dict[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
    before = _ATTRIBUTE.encode()
    for key, value in pax.items():
        if key.startswith(before):
            yield unquote_to_bytes(key.removeprefix(before)), value


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _number(field: bytes, what: str) -> int:
    if field[0] == 0x80:  # base 256, for what octal digits cannot hold
        value = int.from_bytes(field[1:], "big")
    else:
        digits = field.strip(b" \0")
        if digits.strip(b"01234567"):
            raise InvalidError(f"archive is damaged, or not a tar: {what} {field!r}")
        value = int(digits or b"0", 8)
    if value > _MAX_SIZE:
        raise InvalidError(f"archive is damaged: a {what} of {value}")
    return value


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 18:
        raise InvalidError(f"archive is damaged: size {text[:40]!r}")
    return int(text)


def _time(precise: bytes | None, field: bytes) -> int:
    """A time that makes no sense is no reason to refuse an image."""
    found = _PAX_TIME.fullmatch(precise) if precise else None
    if found:
        fraction = int((found[2] or b"").ljust(9, b"0"))
        return max(0, int(found[1]) * 10**9 + fraction)
    digits = field.strip(b" \0")
    if digits and not digits.strip(b"01234567"):
        return min(int(digits, 8), 2**33) * 10**9
    return 0


def _pax_records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Records are `length key=value\\n`, the length counting itself."""
    at = 0
    while at < len(body) and body[at]:
        found = _PAX_LENGTH.match(body, at)
        end = at + int(found[1]) if found else 0
        key, equals, value = body[found.end() if found else at : end - 1].partition(b"=")
        if not found or not equals or end > len(body) or body[end - 1 : end] != b"\n":
            raise InvalidError("archive is damaged: an extended header is not well formed")
        yield key, value
        at = end


def _used(records: Iterator[tuple[bytes, bytes]], kind: bytes) -> Iterator[tuple[bytes, bytes]]:
    """What is looked at: the rest is not kept, however many headers there are. Attributes are each
    member's own."""
    for key, value in records:
        if key.startswith(_SPARSE):
            yield _SPARSE, b""
        elif key in _USED or (kind == b"x" and key.startswith(_ATTRIBUTE.encode())):
            yield key, value


def shown(path: bytes) -> str:
    """A name as an error message shows it: one line, never long."""
    text = repr(path.decode("utf-8", "backslashreplace"))
    return text if len(text) <= 120 else text[:117] + "..."
