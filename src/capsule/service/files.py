"""The files of one sandbox. Everything happens inside it, as its user."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import NamedTuple

from capsule.errors import InvalidError, TooLargeError, UnavailableError
from capsule.link.files import FileReader, Listing
from capsule.link.link import AgentLink
from capsule.link.watch import Watch
from capsule.model import Detail, FileStat
from capsule.service import archive, validate
from capsule.service.access import Access
from capsule.service.entry import Entry
from capsule.service.room import SMALL, Room
from capsule.service.values import TarResult

MAX_ENTRIES = 1_000_000
MAX_ATTRIBUTE_NAME = 255  # of Linux, with its prefix
MAX_METADATA = 4096  # bytes of one file's


class Content(NamedTuple):
    data: bytes
    size: int  # of the whole file; `data` may be a part of it


class Files:
    """Paths are absolute, or relative to /workspace; `..` and NUL are refused.

    Every method raises GoneError and WrongStateError for the sandbox; NotFoundError,
    ForbiddenError, InvalidError, ConflictError, NoSpaceError, TooLargeError as the file system
    inside says; and UnavailableError.
    """

    def __init__(self, access: Access, entry: Entry, room: Room) -> None:
        self._access = access
        self._entry = entry
        self._room = room

    @asynccontextmanager
    async def read(
        self, path: str, *, offset: int = 0, length: int = -1
    ) -> AsyncIterator[FileReader]:
        """`length` -1: to the end. The reader is iterated for the content, in pieces."""
        path = validate.path(path)
        validate.count("offset", offset, 0, 2**62)
        validate.count("length", length, -1, 2**62)
        async with self._visit() as link, link.read(path, offset=offset, length=length) as reader:
            yield reader

    async def read_bytes(
        self, path: str, *, offset: int = 0, length: int = -1, limit: int
    ) -> Content:
        """All of it at once. Raises TooLargeError above `limit`, before and while reading."""
        async with self.read(path, offset=offset, length=length) as reader:
            expected = max(reader.size - offset, 0)
            expected = expected if length < 0 else min(expected, length)
            if expected > limit:
                raise _too_large(path, expected, limit)
            if expected > SMALL:
                await self._room.take(expected)
            known, content = max(expected, SMALL), bytearray()
            async for piece in reader:
                content += piece
                if len(content) > limit:
                    raise _too_large(path, len(content), limit)
                if len(content) > known:  # it grows, or has no size, as in /proc
                    known = limit
                    await self._room.take(limit)
        return Content(bytes(content), reader.size)

    async def write(
        self,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        mode: int = 0o644,
        parents: bool = True,
        append: bool = False,
        exclusive: bool = False,
        in_place: bool = False,
        metadata: Mapping[str, str] | None = None,
        detail: Detail | None = None,
    ) -> FileStat:
        """Atomic: the old content or the new, never a part of it (not with `append`). `in_place`:
        the same file as before, with its mode and further names, and whoever watches it sees it
        written, when all of it has come; who reads it just then may see a part.

        `metadata`, if given, becomes all of the file's attributes under the prefix of `detail`.
        Raises NotSupportedError where the file system has none.
        """
        path = validate.path(path)
        _check_mode(mode)
        if metadata is not None:
            check_metadata(metadata, detail)
        async with self._visit() as link:
            return await link.write(
                path,
                data,
                mode=mode,
                parents=parents,
                append=append,
                exclusive=exclusive,
                in_place=in_place,
                metadata=metadata,
                detail=detail,
            )

    async def list(
        self,
        path: str,
        *,
        recursive: bool = False,
        depth: int | None = None,
        limit: int = 100_000,
        detail: Detail | None = None,
    ) -> Listing:
        """`depth`: how many levels of folders, if recursive; None: all of them."""
        path = validate.path(path)
        validate.count("limit", limit, 1, MAX_ENTRIES)
        async with self._visit() as link:
            return await link.list(
                path, recursive=recursive, depth=depth, limit=limit, detail=detail
            )

    async def make_room(self, size: int) -> None:
        """For what the caller is about to hold of an answer: see `service.room`."""
        await self._room.take(size)

    async def stat(
        self, path: str, *, follow: bool = False, detail: Detail | None = None
    ) -> FileStat:
        path = validate.path(path)
        async with self._visit() as link:
            return await link.stat(path, follow=follow, detail=detail)

    async def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> bool:
        """Whether it was made: False if it was there already, which is fine with `parents`.

        Raises ConflictError when there is something else than a folder.
        """
        path = validate.path(path)
        _check_mode(mode)
        async with self._visit() as link:
            return await link.mkdir(path, parents=parents, mode=mode)

    async def move(
        self, source: str, target: str, *, overwrite: bool = True, parents: bool = False
    ) -> None:
        source, target = validate.path(source, "from"), validate.path(target, "to")
        async with self._visit() as link:
            await link.move(source, target, overwrite=overwrite, parents=parents)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        path = validate.path(path)
        async with self._visit() as link:
            await link.remove(path, recursive=recursive)

    async def chmod(self, path: str, mode: int) -> None:
        path = validate.path(path)
        _check_mode(mode)
        async with self._visit() as link:
            await link.chmod(path, mode)

    async def symlink(self, path: str, target: str) -> None:
        """`target` may be anything: where it leads is decided inside, by whoever follows it."""
        path = validate.path(path)
        validate.text("target", target, least=1, most=validate.MAX_PATH, escapes=True)
        async with self._visit() as link:
            await link.symlink(path, target)

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[Watch]:
        """Once entered, no change is missed. Watching is no activity; what changes files is."""
        path = validate.path(path)
        link = await self._access.awake(self._entry)
        try:
            async with link.watch(path, recursive=recursive) as changes:
                yield changes
        except UnavailableError as error:
            raise await self._access.pulse.explain(self._entry, error, link) from error

    async def tar_out(self, path: str) -> AsyncGenerator[bytes, None]:
        """A pax archive of a folder or file, as a stream. Sockets, FIFOs, devices are left out."""
        path = validate.path(path)
        async with self._visit() as link:
            async with aclosing(archive.pack(link, path)) as pieces:
                async for piece in pieces:
                    self._access.touch(self._entry)
                    yield piece

    async def tar_in(self, path: str, chunks: AsyncIterable[bytes]) -> TarResult:
        """Unpack a tar stream below `path`. Raises InvalidError naming the entry it refuses.

        What came before that entry is there; nothing outside `path` was touched.
        """
        path = validate.path(path)
        async with self._visit() as link:
            return await archive.unpack(link, path, chunks)

    def _visit(self) -> AbstractAsyncContextManager[AgentLink]:
        return self._access.visit(self._entry)


def check_metadata(metadata: Mapping[str, str], detail: Detail | None) -> None:
    """Raises InvalidError, TooLargeError."""
    prefix = detail.attributes if detail else ""
    if not prefix.startswith("user."):
        raise InvalidError(
            f"metadata: {prefix!r} is no prefix of attributes",
            hint="it begins with user.",
            field="metadata",
        )
    total = 0
    for name, value in metadata.items():
        validate.text("metadata name", name, least=1, most=MAX_ATTRIBUTE_NAME - len(prefix))
        validate.text(f"metadata.{name}", value, most=MAX_METADATA, escapes=True)
        total += len(name.encode()) + len(value.encode("utf-8", "surrogateescape"))
    if total > MAX_METADATA:
        raise TooLargeError(
            f"metadata: {total} bytes, limit {MAX_METADATA}", field="metadata", limit=MAX_METADATA
        )


def _check_mode(mode: int) -> None:
    validate.count("mode", mode, 0, 0o7777)


def _too_large(path: str, size: int, limit: int) -> TooLargeError:
    return TooLargeError(
        f"{path} has {size} bytes, limit {limit}",
        hint="download it as a stream, or read a part of it",
        path=path,
        limit=limit,
    )
