"""`/files`: what files contain, in and out, for SDKs and for whoever has a signed link."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from capsule.config import Config
from capsule.edge import multipart
from capsule.edge.body import chunks, lift
from capsule.edge.download import Download, file_headers, open_download, stat_file
from capsule.edge.e2b.entries import DETAIL
from capsule.edge.e2b.guests import Guest
from capsule.edge.e2b.gzipped import deflated, inflated
from capsule.edge.e2b.rpc import Call, json
from capsule.edge.errors import HttpError
from capsule.errors import InvalidError, NotFoundError
from capsule.link.conversation import PIECE
from capsule.service import Service
from capsule.service.files import Files

MODE = 0o644
METADATA = "x-metadata-"
OCTETS = "application/octet-stream"
FORM = f"with curl: -F file=@NAME; or send the content itself as {OCTETS}"


class FileContent:
    def __init__(self, service: Service, config: Config) -> None:
        self._service = service
        self._max_upload = config.max_upload

    def calls(self) -> dict[tuple[str, str], Call]:
        return {
            ("GET", "/files"): self.download,
            ("HEAD", "/files"): self.head,
            ("POST", "/files"): self.upload,
        }

    async def download(self, guest: Guest, request: Request) -> Response:
        path = guest.path(request.query_params.get("path", ""))
        files = self._service.files(guest.id)
        # Who would take it packed as well gets it plain, which is faster; who asks for it, packed.
        packed = request.headers.get("accept-encoding", "").strip().lower() == "gzip"
        try:
            if packed and "range" not in request.headers:
                return await _packed(files, path)
            answer = await open_download(files, path, request)
        except NotFoundError:
            raise _nothing_at(path) from None
        if "content-length" not in answer.headers:
            answer.headers["content-length"] = "0"
        return answer

    async def head(self, guest: Guest, request: Request) -> Response:
        path = guest.path(request.query_params.get("path", ""))
        try:
            found = await stat_file(self._service.files(guest.id), path)
        except NotFoundError:
            raise _nothing_at(path) from None
        length = {"content-length": str(found.size)}
        return Response(headers={**file_headers(found.size, found.mtime), **length})

    async def upload(self, guest: Guest, request: Request) -> Response:
        lift(request, self._max_upload)
        files = self._service.files(guest.id)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        named = request.query_params.get("path", "")
        if kind == multipart.MEDIA_TYPE:
            return json(await self._form(guest, files, request, named))
        if kind != OCTETS:
            allowed = f"{multipart.MEDIA_TYPE} or {OCTETS}"
            text = f"content-type: {kind[:60] or 'missing'}, must be {allowed}"
            raise HttpError(415, "invalid", text)
        if not named:
            raise InvalidError("path is required for an upload of application/octet-stream")
        content = chunks(request.receive)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding == "gzip":
            content = inflated(content)
        elif encoding != "identity":
            text = f"content-encoding: {encoding[:40]}, must be gzip or identity"
            raise HttpError(415, "invalid", text)
        return json([await _write(files, guest.path(named), content, metadata_of(request))])

    async def _form(
        self, guest: Guest, files: Files, request: Request, named: str
    ) -> list[dict[str, Any]]:
        """The path of a single file may be in the query; of several, each has its own."""
        written: list[dict[str, Any]] = []
        metadata = metadata_of(request)
        async for part in multipart.parts(request, hint=FORM):
            if part.name != "file":
                continue
            if named and written:
                raise InvalidError("you cannot specify path for more than one file")
            path = named or part.filename
            if not path:
                raise InvalidError("a file has neither a path nor a name")
            written.append(await _write(files, guest.path(path), aiter(part), metadata))
        if not written:
            raise InvalidError("the form has no file")
        return written


def _nothing_at(path: str) -> NotFoundError:
    return NotFoundError(f"path '{path}' does not exist")


async def _packed(files: Files, path: str) -> Response:
    """What is small has a length, as what is plain has."""
    stack = contextlib.AsyncExitStack()
    reader = await stack.enter_async_context(files.read(path))
    headers = file_headers(reader.size, reader.mtime)
    headers |= {"content-encoding": "gzip", "vary": "accept-encoding"}
    source = deflated(reader)
    if reader.size > PIECE:
        del headers["content-length"]
        return Download(_closing(source, stack), headers, held=stack)
    async with stack:
        body = b"".join([piece async for piece in source])
    return Response(body, headers={**headers, "content-length": str(len(body))})


async def _closing(
    source: AsyncGenerator[bytes, None], stack: contextlib.AsyncExitStack
) -> AsyncGenerator[bytes, None]:
    async with stack:
        async for piece in source:
            yield piece


async def gathered(content: AsyncIterator[bytes]) -> bytes | AsyncIterator[bytes]:
    """What is small in one piece, which is written in one step. What is larger, as it comes."""
    begun = bytearray()
    async for piece in content:
        begun += piece
        if len(begun) > PIECE:
            return _chained(bytes(begun), content)
    return bytes(begun)


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def metadata_of(request: Request) -> dict[str, str]:
    """Of each file that is uploaded, in headers."""
    found = request.headers.items()
    return {k[len(METADATA) :]: value for k, value in found if k.startswith(METADATA)}


async def _write(
    files: Files, path: str, content: AsyncIterator[bytes], metadata: dict[str, str]
) -> dict[str, Any]:
    data = await gathered(content)
    await files.write(path, data, mode=MODE, in_place=True, metadata=metadata, detail=DETAIL)
    told = {"path": path, "name": posixpath.basename(path), "type": "file"}
    return {**told, "metadata": metadata} if metadata else told
