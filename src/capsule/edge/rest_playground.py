"""The API of a web playground. See `playground`.

POST   /api/playground/container               {"sessionId"}: make it, or find it
GET    /api/playground/container?sessionId=    its status
DELETE /api/playground/container?sessionId=
POST   /api/playground/sync                    {"sessionId", "files": FileNode[]}
POST   /api/playground/install                 {"sessionId", "packages"}
POST   /api/playground/execute                 {"sessionId", "code", "filename"}
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import playground as pg
from capsule.edge.body import read_json
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.shapes import checked

Session = Annotated[str, Query(min_length=1, max_length=128)]


def playground_routes(verbs: pg.PlaygroundVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/api/playground", route_class=Route, tags=["playground"])

    @router.post("/container", **describe(types, body=pg.MakePlayground, returns=pg.PlaygroundView))
    async def create(request: Request) -> Response:
        """Make the session's container, or find the one that it has: 512 MiB of memory, half a
        core, no network. It ends when nobody used it for 30 minutes.
        """
        body = await read_json(request, pg.MakePlayground, plain=True)
        return reply(await verbs.create(caller_of(request.scope), body))

    @router.get("/container", **describe(types, returns=pg.PlaygroundStatusView))
    async def status(request: Request, sessionId: Session) -> Response:
        """The session's container as it is now; to ask is no use of it."""
        which = checked(pg.OfPlayground(session_id=sessionId))
        return reply(await verbs.status(caller_of(request.scope), which))

    @router.delete("/container", **describe(types, returns=pg.RemovedView))
    async def remove(request: Request, sessionId: Session) -> Response:
        """Remove the session's container; nothing of it is left when the answer comes."""
        which = checked(pg.OfPlayground(session_id=sessionId))
        return reply(await verbs.remove(caller_of(request.scope), which))

    @router.post("/sync", **describe(types, body=pg.SyncFiles, returns=pg.SyncedView))
    async def sync(request: Request) -> Response:
        """Bring an editor's files into the container: what changed is written, what an earlier
        sync wrote and is gone from the tree is removed.
        """
        body = await read_json(request, pg.SyncFiles, plain=True)
        return reply(await verbs.sync(caller_of(request.scope), body))

    @router.post("/install", **describe(types, body=pg.InstallPackages, returns=pg.RanView))
    async def install(request: Request) -> Response:
        """Run `npm install` in the container."""
        body = await read_json(request, pg.InstallPackages, plain=True)
        return reply(await verbs.install(caller_of(request.scope), body))

    @router.post("/execute", **describe(types, body=pg.ExecuteFile, returns=pg.RanView))
    async def execute(request: Request) -> Response:
        """Write code to a file in /workspace and run it, by the language of its ending."""
        body = await read_json(request, pg.ExecuteFile, plain=True)
        return reply(await verbs.execute(caller_of(request.scope), body))

    return router
