"""Answers that are streams of bytes: a file or a part of it, an archive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capsule.edge.sse import Held, until_gone
from capsule.errors import CapsuleError, ConflictError, InvalidError
from capsule.link.files import FileReader
from capsule.model import FileStat
from capsule.service.files import Files

log = logging.getLogger("capsule.edge")

TAR = "application/x-tar"
# What a sandbox wrote must never be run by a browser as a page of ours.
INERT = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "sandbox; default-src 'none'",
    "content-disposition": "attachment",
}
_RANGE = re.compile(r"^bytes=(\d{0,18})-(\d{0,18})$")


class Part(NamedTuple):
    start: int
    length: int


class Download(Response):
    """Sends what `source` yields as fast as the client takes it, until the client leaves."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        *,
        held: Held,
        status: int = 200,
    ) -> None:
        super().__init__(status_code=status)
        self.raw_headers = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
        self._source = source
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for part in self._source:
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except CapsuleError as error:
            # The status is out. Returning without an end makes the server cut the connection, and
            # the client sees that the content is not whole.
            log.warning("download cut: %s", error)
        finally:
            gone.cancel()
            await asyncio.wait({gone})
            await self._source.aclose()
            await self._held.aclose()


async def begun(source: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> Download:
    """A download whose first part was read: what is wrong from the start is still an error
    answer.
    """
    first = await anext(source, b"")

    async def whole() -> AsyncGenerator[bytes, None]:
        if first:
            yield first
        async for part in source:
            yield part

    return Download(whole(), headers, held=source)


async def open_download(files: Files, path: str, request: Request) -> Response:
    """A file, or the part that Range asks for, or 304 if the client has it already."""
    wanted = request.headers.get("range")
    known = request.headers.get("if-none-match")
    if not wanted and not known:
        return await _download(files, path)
    stat = await stat_file(files, path)
    headers = file_headers(stat.size, stat.mtime)
    if known and is_known(known, headers["etag"]):
        return Response(status_code=304, headers={"etag": headers["etag"]})
    if not wanted or request.headers.get("if-range", headers["etag"]) != headers["etag"]:
        return await _download(files, path)
    part = parse_range(wanted, stat.size)
    if part is None:
        return await _download(files, path)
    if part.length <= 0:
        return Response(status_code=416, headers={"content-range": f"bytes */{stat.size}"})
    return await _download(files, path, part)


async def stat_file(files: Files, path: str) -> FileStat:
    """Raises InvalidError as reading it would: only files have content."""
    stat = await files.stat(path, follow=True)
    if stat.type != "file":
        what = "is a directory" if stat.type == "dir" else "not a regular file"
        raise InvalidError(f"{what}: {path}", path=path)
    return stat


def is_known(if_none_match: str, etag: str) -> bool:
    """A list of tags, weak ones too: those of ours have no comma in them."""
    tags = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
    return any(tag in (etag, "*") for tag in tags)


async def _download(files: Files, path: str, part: Part | None = None) -> Response:
    offset, length = part or (0, -1)
    stack = contextlib.AsyncExitStack()
    reader = await stack.enter_async_context(files.read(path, offset=offset, length=length))
    headers = file_headers(reader.size, reader.mtime)
    if part is None:
        return Download(_limited(reader, path, reader.size, stack), headers, held=stack)
    end = part.start + part.length - 1
    headers["content-range"] = f"bytes {part.start}-{end}/{reader.size}"
    headers["content-length"] = str(part.length)
    return Download(_limited(reader, path, part.length, stack), headers, held=stack, status=206)


async def _limited(
    reader: FileReader, path: str, size: int, stack: contextlib.AsyncExitStack
) -> AsyncGenerator[bytes, None]:
    """As much as was announced, whatever becomes of the file meanwhile. Files of /proc say 0 and
    have content.
    """
    async with stack:
        left = size
        async for part in reader:
            if size and len(part) >= left:
                yield part[:left]
                return
            left -= len(part)
            yield part
        if size:
            raise ConflictError(f"{path} became smaller while it was read", path=path)


def file_headers(size: int, mtime: float) -> dict[str, str]:
    headers = {
        "content-type": "application/octet-stream",
        "accept-ranges": "bytes",
        "etag": f'"{int(mtime * 1e6):x}-{size:x}"',
        **INERT,
    }
    if size:
        headers["content-length"] = str(size)
    return headers


def parse_range(text: str, size: int) -> Part | None:
    """One range of a file of `size` bytes. None: not understood, so the whole file is sent.

    Length 0: there is nothing.
    """
    match = _RANGE.match(text.strip())
    if not match or not (match[1] or match[2]):
        return None
    if not match[1]:
        length = min(int(match[2]), size)
        return Part(size - length, length)
    start = int(match[1])
    end = min(int(match[2]) if match[2] else size - 1, size - 1)
    if match[2] and int(match[2]) < start:
        return None
    return Part(start, end - start + 1)
