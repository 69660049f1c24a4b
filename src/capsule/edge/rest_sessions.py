"""REST under `/api`: stateful sessions. S is /api/sessions/{session_id}.

    POST   /api/sessions             {"provider", "environment"} or {"agent"}
    GET    /api/sessions             ?state=open
    GET    S                         as it is now
    DELETE S                         ?sandbox_id=, ?purge=true: its log and artifacts as well
    POST   S/close, S/reopen         without a sandbox, with its files kept; with one again
    GET    S/executions              the log; ?after=&limit=
    GET    S/artifacts               and …/{artifact_id} for the content
    GET    S/tools                   ?format=openai: what a model may call
    POST   S/tools/{name}            {"arguments": {…}}
    POST   /api/e2b/execute          {"session_id", "code"}
    GET    /api/e2b/files/{session_id}   ?path=: a folder, or a file with its content
    POST   /api/e2b/files            {"session_id", "path", "content"}

Every provider serves these, whatever the path says. Bodies are JSON, also when `curl -d` calls them
a form.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import session_shapes as ss
from capsule.edge import session_views as sv
from capsule.edge.body import read_json
from capsule.edge.download import INERT, Download, Part, is_known, parse_range
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.session_verbs import SessionVerbs
from capsule.model import WORKSPACE
from capsule.sessions.records import Artifact

PIECE = 256 * 1024
OCTETS = "application/octet-stream"
# Types that no browser runs. Others are sent as bytes; what they are is in the list of artifacts.
HARMLESS = frozenset(
    "image/png image/jpeg image/gif image/webp application/pdf application/json text/csv text/plain"
    " text/markdown application/zip application/gzip".split()
)
State = Literal["opening", "open", "closed", "deleted"]


def tenant_of(request: Request) -> str:
    return caller_of(request.scope).tenant


def base_of(request: Request) -> str:
    """The server's address as this client knows it; the guard has checked the name."""
    return f"{request.url.scheme}://{request.headers['host']}"


def session_routes(verbs: SessionVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/api", route_class=Route, tags=["sessions"])
    _life(router, verbs, types)
    _work(router, verbs, types)
    _left(router, verbs, types)
    return router


def _life(router: APIRouter, verbs: SessionVerbs, types: Described) -> None:
    @router.post(
        "/sessions",
        **describe(types, body=ss.BeginSession, returns=sv.StartedSessionView, status=201),
    )
    async def create(request: Request) -> Response:
        """Begin a session; its sandbox runs when the answer comes. `provider` and `environment`
        say where and with what, or `agent` names both; `session_id` may be yours to choose.
        """
        wanted = await read_json(request, ss.BeginSession, plain=True)
        return reply(await verbs.create(tenant_of(request), wanted, base_of(request)), 201)

    @router.get("/sessions", **describe(types, returns=sv.SessionsView))
    async def list_sessions(
        request: Request,
        state: State | None = None,
        after: Annotated[str | None, Query(max_length=64)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """Sessions, oldest first, those made after `after`; those that were deleted only if they
        are asked for.
        """
        who, base = tenant_of(request), base_of(request)
        return reply(await verbs.list(who, base, state=state, after=after, limit=limit))

    @router.get("/sessions/{session_id}", **describe(types, returns=sv.SessionStateView))
    async def get(session_id: str, request: Request) -> Response:
        """A session as it is now, also one that is closed or deleted."""
        return reply(await verbs.get(tenant_of(request), session_id, base_of(request)))

    @router.delete("/sessions/{session_id}", **describe(types, returns=sv.DeletedSessionView))
    async def delete(
        session_id: str,
        request: Request,
        sandbox_id: Annotated[str | None, Query(max_length=64)] = None,
        purge: bool = False,
    ) -> Response:
        """End its sandbox and remove its files. Its log and its artifacts stay until they are old,
        unless `purge` is given.
        """
        who = tenant_of(request)
        return reply(await verbs.delete(who, session_id, sandbox_id=sandbox_id, purge=purge))

    @router.post("/sessions/{session_id}/close", **describe(types, returns=sv.SessionStateView))
    async def close(session_id: str, request: Request) -> Response:
        """End its sandbox and keep its files."""
        return reply(await verbs.close(tenant_of(request), session_id, base_of(request)))

    @router.post("/sessions/{session_id}/reopen", **describe(types, returns=sv.SessionStateView))
    async def reopen(session_id: str, request: Request) -> Response:
        """Give a closed session a new sandbox with its files."""
        return reply(await verbs.reopen(tenant_of(request), session_id, base_of(request)))


def _work(router: APIRouter, verbs: SessionVerbs, types: Described) -> None:
    @router.post(
        "/e2b/execute", **describe(types, body=ss.ExecuteInSession, returns=sv.ExecutedView)
    )
    async def execute(request: Request) -> Response:
        """Run code as in a notebook: variables, imports and functions live on."""
        wanted = await read_json(request, ss.ExecuteInSession, plain=True)
        return reply(await verbs.execute(caller_of(request.scope), wanted, base_of(request)))

    @router.get("/e2b/files/{session_id}", **describe(types, returns=sv.SessionFilesView))
    async def files(
        session_id: str,
        request: Request,
        path: Annotated[str, Query(min_length=1, max_length=4096)] = WORKSPACE,
        recursive: bool = False,
    ) -> Response:
        """What is in a folder; or a file, with its content."""
        return reply(await verbs.files(tenant_of(request), session_id, path, recursive))

    @router.post(
        "/e2b/files", **describe(types, body=ss.WriteSessionFiles, returns=sv.WrittenFilesView)
    )
    async def write(request: Request) -> Response:
        """Write a file, or several as `files`; each whole or not at all."""
        wanted = await read_json(request, ss.WriteSessionFiles, plain=True)
        return reply(await verbs.write(tenant_of(request), wanted))

    @router.get("/sessions/{session_id}/tools", **describe(types, raw="application/json"))
    async def tools(session_id: str, request: Request, format: ss.Format = "capsule") -> Response:
        """What a model may call in this session: its agent's tools, or all there are."""
        return reply(await verbs.tools(tenant_of(request), session_id, format))

    @router.post(
        "/sessions/{session_id}/tools/{name}",
        **describe(types, body=ss.CallTool, returns=sv.ExecutedView),
    )
    async def call_tool(session_id: str, name: str, request: Request) -> Response:
        """Call a tool. Arguments that do not fit its schema are refused before anything runs."""
        wanted = await read_json(request, ss.CallTool, plain=True)
        caller, base = caller_of(request.scope), base_of(request)
        return reply(await verbs.call_tool(caller, session_id, name, wanted, base))


def _left(router: APIRouter, verbs: SessionVerbs, types: Described) -> None:
    @router.get("/sessions/{session_id}/executions", **describe(types, returns=sv.LogView))
    async def executions(
        session_id: str,
        request: Request,
        after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """What was run in it, oldest first, with as much of code and output as is kept."""
        found = await verbs.log(tenant_of(request), session_id, after=after, limit=limit)
        return reply(found)

    @router.get("/sessions/{session_id}/artifacts", **describe(types, returns=sv.ArtifactsView))
    async def artifacts(session_id: str, request: Request) -> Response:
        """The files that it left, oldest first."""
        return reply(await verbs.artifacts(tenant_of(request), session_id, base_of(request)))

    @router.get("/sessions/{session_id}/artifacts/{artifact_id}", **describe(types, raw=OCTETS))
    async def artifact(session_id: str, artifact_id: str, request: Request) -> Response:
        """The content of one, or the part that Range asks for, as a download that no browser shows
        as a page of ours.
        """
        found, file = await verbs.artifact(tenant_of(request), session_id, artifact_id)
        stack = contextlib.AsyncExitStack()
        stack.push_async_callback(asyncio.to_thread, file.close)
        answer = _download(found, file, request, stack)
        if not isinstance(answer, Download):
            await stack.aclose()
        return answer


def _download(
    artifact: Artifact, file: BinaryIO, request: Request, stack: contextlib.AsyncExitStack
) -> Response:
    headers = artifact_headers(artifact)
    tag = headers["etag"]
    if is_known(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers={"etag": tag})
    part = None
    if request.headers.get("if-range", tag) == tag:
        part = parse_range(request.headers.get("range", ""), artifact.size)
    if part is None:
        return Download(_content(file, Part(0, artifact.size)), headers, held=stack)
    if part.length <= 0:
        return Response(status_code=416, headers={"content-range": f"bytes */{artifact.size}"})
    end = part.start + part.length - 1
    headers["content-range"] = f"bytes {part.start}-{end}/{artifact.size}"
    headers["content-length"] = str(part.length)
    return Download(_content(file, part), headers, held=stack, status=206)


async def _content(file: BinaryIO, part: Part) -> AsyncGenerator[bytes, None]:
    await asyncio.to_thread(file.seek, part.start)
    left = part.length
    while left and (piece := await asyncio.to_thread(file.read, min(PIECE, left))):
        left -= len(piece)
        yield piece


def artifact_headers(artifact: Artifact) -> dict[str, str]:
    return {
        **INERT,
        "content-type": artifact.mime if artifact.mime in HARMLESS else OCTETS,
        "content-length": str(artifact.size),
        "content-disposition": disposition(artifact.name),
        "etag": f'"{artifact.sha256}"',
        "accept-ranges": "bytes",
        "cache-control": "private, max-age=0",
    }


def disposition(name: str) -> str:
    """The last part of a name as RFC 6266 wants it. A name from a sandbox may hold anything."""
    last = name.rpartition("/")[2][:200] or "artifact"
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._- ") else "_" for c in last)
    plain = plain.strip(". ") or "artifact"
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(last, safe='')}"
