"""Folders as tar streams, both ways, in constant memory.

The host only reads headers. Every file is written and read by the agent inside, as the sandbox's
user and against its quota, so an archive can do nothing that a program in the sandbox could not.

Coming in, refused with the entry's name: absolute names, `..`, names that pass through a
symbolic link of the same archive, devices and FIFOs, sparse files. Symbolic links are made as
they are; hard links become copies. Owners and times are not kept, nor are set-uid bits. Going
out, sockets, FIFOs and devices are left out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from capsule.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    TooLargeError,
)
from capsule.link.link import AgentLink
from capsule.model import FileStat
from capsule.service import tarformat as tar
from capsule.service.tarformat import BLOCK, Header
from capsule.service.values import TarResult
from capsule.settings import brief

MAX_ENTRIES = 200_000
PIECE = 256 * 1024


async def pack(link: AgentLink, path: str) -> AsyncGenerator[bytes, None]:
    """Names are relative to `path`; a single file has its own name."""
    top = await link.stat(path, follow=True)
    if top.type == "dir":
        base, entries = path.rstrip("/"), await _entries(link, path)
        paths = [(f"{base}/{entry.path}", entry) for entry in entries]
    else:
        paths = [(path, replace(top, path=top.name))]
    for where, entry in paths:
        async with aclosing(_pack_entry(link, where, entry)) as pieces:
            async for piece in pieces:
                yield piece
    yield tar.END


async def _entries(link: AgentLink, path: str) -> list[FileStat]:
    """All there is below a folder. What cannot be packed is known before the first byte is sent;
    later there is nothing but to cut the stream.
    """
    listing = await link.list(path, recursive=True, limit=MAX_ENTRIES)
    if entry := next(filter(_is_unreadable, listing.entries), None):
        raise ForbiddenError(
            f"permission denied: {path.rstrip('/')}/{entry.path} has mode {entry.mode:03o}",
            hint="change its mode, or remove it",
            path=path,
        )
    if listing.truncated and len(listing.entries) < MAX_ENTRIES:
        raise InvalidError(
            f"{path} has folders that cannot be read or lie too deep",
            hint="take its folders one by one",
            path=path,
        )
    if listing.truncated:
        raise TooLargeError(
            f"{path} has more than {MAX_ENTRIES} entries",
            hint="take its folders one by one",
            path=path,
            limit=MAX_ENTRIES,
        )
    return listing.entries


def _is_unreadable(entry: FileStat) -> bool:
    return entry.type in ("file", "dir") and not entry.mode & 0o444


async def _pack_entry(link: AgentLink, path: str, entry: FileStat) -> AsyncGenerator[bytes, None]:
    header = Header(
        name=entry.path,
        type=tar.FILE,
        mode=entry.mode,
        mtime=int(entry.mtime),
        uid=entry.uid,
        gid=entry.gid,
    )
    match entry.type:
        case "dir":
            header = replace(header, name=entry.path + "/", type=tar.FOLDER)
        case "symlink":
            header = replace(header, type=tar.SYMLINK, target=entry.target or "")
        case "file":
            async with aclosing(_pack_file(link, path, header)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        case _:
            return
    for piece in tar.format_header(header):
        yield piece


async def _pack_file(link: AgentLink, path: str, header: Header) -> AsyncGenerator[bytes, None]:
    async with AsyncExitStack() as stack:
        try:
            reader = await stack.enter_async_context(link.read(path))
        except NotFoundError:
            return  # removed since it was listed
        size, sent = reader.size, 0
        for block in tar.format_header(replace(header, size=size)):
            yield block
        async for piece in reader:
            piece = piece[: size - sent]  # it may have grown; the header has been sent
            sent += len(piece)
            yield piece
            if sent == size:
                break
        if sent < size:
            raise ConflictError(f"{path} became smaller while it was read", path=path)
        yield tar.padding(size)


async def unpack(link: AgentLink, path: str, chunks: AsyncIterable[bytes]) -> TarResult:
    source = _Source(chunks)
    writer = _Writer(link, path)
    count = files = size = 0
    async for header in _headers(source):
        count += 1
        if count > MAX_ENTRIES:
            raise TooLargeError(
                f"archive: more than {MAX_ENTRIES} entries", limit=MAX_ENTRIES, path=path
            )
        await writer.put(header, source)
        if header.type in (tar.FILE, tar.HARD_LINK):
            files += 1
            size += header.size
    await writer.finish()
    return TarResult(files, size)


async def _headers(source: _Source) -> AsyncIterator[Header]:
    """The entries, with what extension headers say about them. Content is left to the caller."""
    extra: dict[str, str] = {}
    while block := await source.block():
        header = tar.parse_header(block)
        if header is None:
            await source.drain()
            return
        match header.type:
            case tar.PAX:
                extra |= tar.parse_pax(await source.extension(header.size))
            case tar.PAX_GLOBAL:
                await source.extension(header.size)
            case tar.GNU_NAME:
                extra["path"] = _long_name(await source.extension(header.size))
            case tar.GNU_TARGET:
                extra["linkpath"] = _long_name(await source.extension(header.size))
            case _:
                yield _with_extra(header, extra)
                extra = {}


def _long_name(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _with_extra(header: Header, extra: dict[str, str]) -> Header:
    if any(key.startswith("GNU.sparse") for key in extra) or header.type == b"S":
        raise _refused(header.name, "is a sparse file", "pack it without --sparse")
    name = extra.get("path", header.name)
    size = tar.pax_size(extra["size"]) if "size" in extra else header.size
    return replace(header, name=name, size=size, target=extra.get("linkpath", header.target))


class _Source:
    """The archive's bytes. Holds at most one chunk, and one extension header."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = aiter(chunks)
        self._buffer = memoryview(b"")

    async def _more(self) -> bool:
        async for chunk in self._chunks:
            if chunk:
                self._buffer = memoryview(chunk)
                return True
        return False

    async def _take(self, most: int) -> memoryview:
        """At least one byte; none at the end."""
        if not self._buffer and not await self._more():
            return self._buffer
        piece, self._buffer = self._buffer[:most], self._buffer[most:]
        return piece

    async def _exactly(self, size: int, what: str) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await self._take(size - len(data))
            if not piece:
                raise InvalidError(f"archive: ends in the middle of {what}")
            data += piece
        return bytes(data)

    async def block(self) -> bytes:
        """The next header; b"" at the end of an archive without an end mark."""
        first = await self._take(BLOCK)
        if not first:
            return b""
        return bytes(first) + await self._exactly(BLOCK - len(first), "a header")

    async def extension(self, size: int) -> bytes:
        if size > tar.MAX_EXTENSION:
            raise TooLargeError(
                f"archive: an extension header has {size} bytes, limit {tar.MAX_EXTENSION}",
                limit=tar.MAX_EXTENSION,
            )
        data = await self._exactly(size, "an extension header")
        await self._exactly(-size % BLOCK, "an extension header")
        return data

    async def content(self, size: int, name: str) -> AsyncIterator[bytes]:
        left = size
        while left:
            piece = await self._take(min(left, PIECE))
            if not piece:
                raise InvalidError(f"archive: ends in the middle of {brief(name)}")
            left -= len(piece)
            yield bytes(piece)
        await self._exactly(-size % BLOCK, brief(name))

    async def drain(self) -> None:
        """What follows the end mark: padding, which a sender wants to get rid of."""
        while await self._take(PIECE):
            pass


class _Writer:
    """Makes the entries inside. Knows the links it made, so that none is written through."""

    def __init__(self, link: AgentLink, path: str) -> None:
        self._link = link
        self._path = path.rstrip("/") or "/"
        self._links: set[str] = set()
        self._folders: set[str] = set()
        self._modes: list[tuple[str, int]] = []  # folders to be closed once they are filled

    async def put(self, header: Header, source: _Source) -> None:
        name = self._checked(header.name)
        path = f"{self._path}/{name}" if name else self._path
        if not name and header.type != tar.FOLDER:
            raise _refused(header.name, "has no name")
        if name in self._links and header.type in (tar.FILE, tar.HARD_LINK):
            await self._link.remove(path)  # in its place, not in the place it leads to
            self._links.discard(name)
        match header.type:
            case tar.FILE:
                content = source.content(header.size, header.name)
                await self._link.write(path, content, mode=header.mode & 0o777)
            case tar.FOLDER:
                await self._folder(path, header.mode & 0o777)
            case tar.SYMLINK:
                await self._symlink(name, path, header.target)
            case tar.HARD_LINK:
                await self._copy(self._checked(header.target), path)
            case _:
                what = tar.SPECIAL.get(header.type, f"of an unknown type {header.type!r}")
                raise _refused(header.name, f"is {what}")

    async def _folder(self, path: str, mode: int) -> None:
        if path not in self._folders:
            await self._link.mkdir(path, mode=mode | 0o700)
            self._folders.add(path)
        if mode & 0o700 != 0o700:
            self._modes.append((path, mode))

    async def _symlink(self, name: str, path: str, target: str) -> None:
        if not target or "\0" in target or len(target) > 4095:
            raise _refused(name, "is a link with an impossible target")
        parent = path.rpartition("/")[0]
        if parent:
            await self._folder(parent, 0o755)
        try:
            await self._link.symlink(path, target)
        except ConflictError:
            await self._link.remove(path)
            await self._link.symlink(path, target)
        self._links.add(name)

    async def _copy(self, source: str, path: str) -> None:
        """A hard link, which the agent has no word for."""
        async with self._link.read(f"{self._path}/{source}") as reader:
            await self._link.write(path, reader, mode=reader.mode & 0o777)

    async def finish(self) -> None:
        for path, mode in reversed(self._modes):
            await self._link.chmod(path, mode)

    def _checked(self, name: str) -> str:
        """A name that stays below our folder, without the parts that say nothing."""
        if name.startswith("/"):
            raise _refused(name, "has an absolute name")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise _refused(name, "has '..' in its name")
        if len(name) > 4000 or "\0" in name:
            raise _refused(name, "has an impossible name")
        for end in range(1, len(parts)) if self._links else ():
            if "/".join(parts[:end]) in self._links:
                raise _refused(name, "leads through a symbolic link of the archive")
        return "/".join(parts)


def _refused(name: str, why: str, hint: str | None = None) -> InvalidError:
    return InvalidError(f"archive: {brief(name)} {why}", hint=hint, entry=name[:200])
