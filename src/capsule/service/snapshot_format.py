"""What a snapshot is in a file: a tar that people can look into, in this order.

    manifest.json   what it is and where it comes from
    files/…         the files, as programs in the sandbox see them below /
    sha256          of all bytes before this member

The last member and the end of the tar have a fixed size, so whoever reads the stream knows all of
it without a word about the members between, which are the provider's. A file that was cut off,
damaged or changed does not end as its bytes say. gzip around it is taken; what it hides is limited.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec

from capsule.errors import InvalidError, NotSupportedError, TooLargeError
from capsule.model import GIB, MIB
from capsule.service import tarformat as tar
from capsule.service.tarformat import BLOCK, Header

FORMAT = "capsule-snapshot"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST = 1 * MIB
TRAILER = 2 * BLOCK + len(tar.END)
PIECE = 1 * MIB
FREE = 64 * MIB  # that gzip may unpack to from nothing
RATIO = 100  # and no more than that beyond it
_HINT = "take an archive as `capsule snapshot export` writes it"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int
    template: str
    provider: str
    name: str = ""
    created_at: datetime | None = None
    size: int = 0  # bytes of content
    files: int = 0
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)


class Opened(NamedTuple):
    manifest: Manifest
    members: AsyncGenerator[bytes, None]  # a whole tar of the files; raises if it is not as it was


def member(name: str, content: bytes) -> bytes:
    header = b"".join(tar.format_header(Header(name=name, type=tar.FILE, size=len(content))))
    return header + content + tar.padding(len(content))


def trailer(digest: str) -> bytes:
    return member("sha256", digest.encode() + b"\n") + tar.END


async def pack(
    manifest: Manifest, members: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    digest = hashlib.sha256()
    # The provider speaks first: what is wrong with the files is then known before any byte is out.
    piece = await anext(members, b"")
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    begin = member(MANIFEST, text + b"\n")
    digest.update(begin)
    yield begin
    while piece:
        digest.update(piece)
        yield piece
        piece = await anext(members, b"")
    yield trailer(digest.hexdigest())


async def unpack(chunks: AsyncIterable[bytes], *, most_bytes: int) -> Opened:
    """Reads as far as the manifest. Raises InvalidError, NotSupportedError, TooLargeError."""
    plain = _Plain(_limited(_unzipped(chunks), 2 * most_bytes + GIB))
    head = await plain.exactly(BLOCK)
    header = tar.parse_header(head)
    if header is None or header.name != MANIFEST or header.type != tar.FILE:
        raise InvalidError("archive: this is no snapshot, it has no manifest", hint=_HINT)
    if header.size > MAX_MANIFEST:
        raise TooLargeError(f"archive: a manifest of {header.size} bytes, limit {MAX_MANIFEST}")
    content = await plain.exactly(header.size)
    rest = await plain.exactly(len(tar.padding(header.size)))
    digest = hashlib.sha256(head + content + rest)
    return Opened(_manifest(content), _members(plain, digest))


def _manifest(content: bytes) -> Manifest:
    try:
        found = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidError(f"archive: its manifest cannot be read: {error}", hint=_HINT) from error
    if found.format != FORMAT:
        raise InvalidError(f"archive: not a snapshot but {found.format[:80]!r}", hint=_HINT)
    if found.version != VERSION:
        raise NotSupportedError(
            f"archive: of format {found.version}, this server reads {VERSION}",
            hint="import it with a newer server",
        )
    return found


async def _members(plain: _Plain, digest: hashlib._Hash) -> AsyncGenerator[bytes, None]:
    held = b""
    async for piece in plain.pieces():
        held += piece
        ready, held = held[:-TRAILER], held[-TRAILER:]
        digest.update(ready)
        if ready:
            yield ready
    if held != trailer(digest.hexdigest()):
        raise InvalidError(
            "archive: it is cut off, or was changed: its sha256 is not what it says",
            hint="make or fetch it again; " + _HINT,
        )
    yield tar.END


class _Plain:
    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        self._chunks = chunks
        self._held = b""

    async def exactly(self, size: int) -> bytes:
        while len(self._held) < size:
            more = await anext(self._chunks, b"")
            if not more:
                raise InvalidError("archive: it is cut off", hint="make or fetch it again")
            self._held += more
        found, self._held = self._held[:size], self._held[size:]
        return found

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        held, self._held = self._held, b""
        yield held
        async for chunk in self._chunks:
            yield chunk


async def _limited(chunks: AsyncGenerator[bytes, None], most: int) -> AsyncGenerator[bytes, None]:
    """Headers count, too: a tar may be nothing but headers."""
    total = 0
    async for chunk in chunks:
        total += len(chunk)
        if total > most:
            raise TooLargeError(
                f"archive: more than {most} bytes",
                hint="raise the server's max_snapshot",
                limit=most,
            )
        yield chunk


async def _unzipped(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    source = aiter(chunks)
    first = b""
    while len(first) < 2 and (more := await anext(source, b"")):
        first += more
    if not first.startswith(b"\x1f\x8b"):
        yield first
        async for chunk in source:
            yield chunk
        return
    gzip = _Gzip()
    while first:
        async for piece in gzip.feed(first):
            yield piece
        first = await anext(source, b"")
    gzip.end()


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)
        self._taken = 0
        self._given = 0

    async def feed(self, chunk: bytes) -> AsyncGenerator[bytes, None]:
        self._taken += len(chunk)
        while chunk:
            piece = await asyncio.to_thread(self._step, chunk)
            chunk = self._stream.unconsumed_tail
            self._given += len(piece)
            if self._given > FREE + RATIO * self._taken:
                raise TooLargeError(
                    f"archive: gzip makes {self._given} bytes of {self._taken}, limit {RATIO} to 1",
                    hint="send it as it was exported, without gzip",
                    limit=RATIO,
                )
            yield piece

    def _step(self, chunk: bytes) -> bytes:
        try:
            piece = self._stream.decompress(chunk, PIECE)
        except zlib.error as error:
            raise InvalidError(
                f"archive: its gzip is damaged: {error}", hint="make or fetch it again"
            ) from error
        if self._stream.unused_data:
            raise InvalidError("archive: something follows the end of its gzip")
        return piece

    def end(self) -> None:
        if not self._stream.eof:
            raise InvalidError("archive: its gzip is cut off", hint="make or fetch it again")
