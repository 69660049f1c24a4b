"""REST under `/v1`: a sandbox's files, of any size, in constant memory. S is /v1/sandboxes/{id}.

    GET    S/files/{path}      content; Range, ETag; HEAD
    PUT    S/files/{path}      the body is the content; ?mode=755&append=&exclusive=&parents=
    DELETE S/files/{path}      ?recursive=true for folders
    PATCH  S/files/{path}      {"mode": "755"}
    GET    S/dirs/{path}       entries; ?recursive=true
    PUT    S/dirs/{path}       make a folder; ?parents=&mode=
    GET    S/stat/{path}       ?follow=true
    POST   S/move              {"from", "to", "overwrite"}, or the same as ?from=&to=&overwrite=
    GET    S/archive?path=     the folder as a tar stream
    PUT    S/archive?path=     unpack a tar stream there
    GET    S/watch?path=       changes as events: {"change", "path", "is_dir"}; ?recursive=true

`{path}` in the URL is absolute: …/files/workspace/a.py is /workspace/a.py. A path relative to
/workspace goes into the query instead: …/files?path=a.py. A name that is not UTF-8 is percent-
encoded as its bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.body import chunks, lift, read_json
from capsule.edge.download import INERT, TAR, begun, file_headers, open_download, stat_file
from capsule.edge.errors import invalid_field
from capsule.edge.files import FileVerbs, absolute
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.sse import EventStream, change_events
from capsule.edge.verbs import Verbs
from capsule.model import WORKSPACE

OCTETS = "application/octet-stream"

PathQuery = Annotated[str | None, Query(max_length=4096)]
ModeQuery = Annotated[str, Query(pattern="^0?[0-7]{3,4}$")]


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


class NewMode(s.Shape, kw_only=True, frozen=True):
    mode: s.Mode


def _with_path(about: dict[str, Any]) -> dict[str, Any]:
    """FastAPI documents what a handler has as an argument; they take this from the URL itself."""
    path = {"name": "path", "in": "path", "required": True, "schema": {"type": "string"}}
    return {**about, "openapi_extra": {**about["openapi_extra"], "parameters": [path]}}


def file_routes(verbs: Verbs, files: FileVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/sandboxes/{id}", route_class=Route, tags=["files"])
    service = verbs.service

    def at(method: str, where: str, **about: Any) -> Callable[[Handler], Handler]:
        """A route with the path in the URL, and the same with the path in the query."""
        in_url = router.api_route(f"/{where}/{{path:path}}", methods=[method], **_with_path(about))
        in_query = router.api_route(f"/{where}", methods=[method], **about, include_in_schema=False)
        return lambda handler: in_url(in_query(handler))

    @at("GET", "files", **describe(types, raw=OCTETS))
    async def download(id: str, request: Request) -> Response:
        """A file's content, or the part of it that Range asks for."""
        return await open_download(service.files(id), path_of(request), request)

    @at("HEAD", "files", **describe(types, raw=OCTETS))
    async def head(id: str, request: Request) -> Response:
        """A file's size and ETag."""
        stat = await stat_file(service.files(id), path_of(request))
        return Response(headers=file_headers(stat.size, stat.mtime))

    @at("PUT", "files", **describe(types, raw_body=OCTETS, returns=v.WrittenView))
    async def upload(
        id: str,
        request: Request,
        mode: ModeQuery = "644",
        append: bool = False,
        exclusive: bool = False,
        parents: bool = True,
    ) -> Response:
        """Write a file of any size; unless appended to, it is replaced in one step at the end."""
        lift(request, verbs.config.max_upload)
        path = path_of(request)
        stat = await service.files(id).write(
            path,
            chunks(request.receive),
            mode=s.mode_bits(mode),
            parents=parents,
            append=append,
            exclusive=exclusive,
        )
        return reply(v.WrittenView(path=absolute(path), size=stat.size))

    @at("DELETE", "files", **describe(types, returns=v.DoneView))
    async def remove(id: str, request: Request, recursive: bool = False) -> Response:
        """Remove a file, a symlink, or a folder."""
        await service.files(id).remove(path_of(request), recursive=recursive)
        return reply(v.DoneView())

    @at("PATCH", "files", **describe(types, body=NewMode, returns=v.DoneView))
    async def chmod(id: str, request: Request) -> Response:
        """Change a file's mode: a number, or octal digits as text."""
        mode = (await read_json(request, NewMode)).mode
        await service.files(id).chmod(path_of(request), s.mode_bits(mode))
        return reply(v.DoneView())

    @at("GET", "dirs", **describe(types, returns=v.ListingView))
    async def list_dir(
        id: str,
        request: Request,
        recursive: bool = False,
        limit: Annotated[int, Query(ge=1, le=1_000_000)] = 100_000,
    ) -> Response:
        """The entries of a folder."""
        path = path_of(request, default=WORKSPACE)
        return reply(await files.list(id, s.ListDir(path=path, recursive=recursive, limit=limit)))

    @at("PUT", "dirs", **describe(types, returns=v.DoneView))
    async def mkdir(
        id: str, request: Request, parents: bool = True, mode: ModeQuery = "755"
    ) -> Response:
        """Make a folder."""
        path = path_of(request)
        return reply(await files.mkdir(id, s.Mkdir(path=path, parents=parents, mode=mode)))

    @at("GET", "stat", **describe(types, returns=v.FileView))
    async def stat(id: str, request: Request, follow: bool = False) -> Response:
        """What is at a path; with `follow`, what a symlink there leads to."""
        return reply(await files.stat(id, s.Stat(path=path_of(request), follow=follow)))

    @router.post("/move", **describe(types, body=s.Move, returns=v.DoneView))
    async def move(id: str, request: Request, overwrite: bool = True) -> Response:
        """Move or rename. Names that are not UTF-8 go into the query, as ?from=&to=."""
        words = query_words(request)
        if "from" in words and "to" in words:
            wanted = s.Move(source=words["from"], target=words["to"], overwrite=overwrite)
        else:
            wanted = await read_json(request, s.Move)
        return reply(await files.move(id, wanted))

    @router.get("/archive", **describe(types, raw=TAR))
    async def pack(id: str, request: Request, path: PathQuery = WORKSPACE) -> Response:
        """A folder or file as a tar stream."""
        source = service.files(id).tar_out(path_of(request, default=WORKSPACE))
        return await begun(source, headers={"content-type": TAR, **INERT})

    @router.put("/archive", **describe(types, raw_body=TAR, returns=v.UnpackedView))
    async def unpack(id: str, request: Request, path: PathQuery = WORKSPACE) -> Response:
        """Unpack a tar stream into a folder."""
        lift(request, verbs.config.max_upload)
        into = path_of(request, default=WORKSPACE)
        done = await service.files(id).tar_in(into, chunks(request.receive))
        return reply(v.UnpackedView(files=done.files, bytes=done.bytes))

    @router.get("/watch", **describe(types, raw=EventStream.media_type))
    async def watch(
        id: str, request: Request, path: PathQuery = WORKSPACE, recursive: bool = False
    ) -> Response:
        """Changes below a folder while they happen."""
        folder = path_of(request, default=WORKSPACE)
        watching = service.files(id).watch(folder, recursive=recursive)
        stack = contextlib.AsyncExitStack()
        changes = await stack.enter_async_context(watching)
        events = change_events(changes, stack)
        return EventStream(events, held=stack, until=verbs.gate.closing)

    return router


def path_of(request: Request, *, default: str | None = None) -> str:
    """The file's path: absolute from the URL, or from `?path=`. Bytes that are not UTF-8
    survive.
    """
    if "path" in request.path_params:
        raw: bytes = request.scope["raw_path"].split(b"/", 5)[5]
        path = unquote_to_bytes(raw).decode("utf-8", "surrogateescape")
        return "/" + path.lstrip("/")
    path = query_words(request).get("path") or default or ""
    if not path:
        raise invalid_field("path", "missing", hint="name it in the URL, or as ?path=")
    return path


def query_words(request: Request) -> dict[str, str]:
    """Starlette's own would replace the bytes that are not UTF-8."""
    query: str = request.scope["query_string"].decode("latin-1")
    return dict(parse_qsl(query, errors="surrogateescape"))
