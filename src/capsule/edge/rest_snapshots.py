"""REST under `/v1`: snapshots and forks.

POST   /v1/sandboxes/{id}/snapshots   {"name": …}: keep its files under this name
POST   /v1/sandboxes/{id}/fork        {"count": n, "at": step}: up to 20 copies
GET    /v1/sandboxes/{id}/steps
GET    /v1/sandboxes/{id}/diff        ?from=1&to=3
POST   /v1/sandboxes/{id}/undo        {"to": step}
GET    /v1/snapshots
GET    /v1/snapshots/{name}
DELETE /v1/snapshots/{name}
GET    /v1/snapshots/{name}/archive   the snapshot as a tar
PUT    /v1/snapshots/{name}/archive   a snapshot from such a tar; ?template=&provider=
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.body import chunks, lift, read_json
from capsule.edge.download import TAR
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.shapes import checked
from capsule.edge.snapshot_verbs import SnapshotVerbs


def snapshot_routes(verbs: SnapshotVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=Route, tags=["snapshots"])

    @router.post(
        "/sandboxes/{id}/snapshots",
        **describe(types, body=s.MakeSnapshot, returns=v.SnapshotView, status=201),
    )
    async def make(id: str, request: Request) -> Response:
        """Keep its files, as they are at one moment, under a name."""
        return reply(await verbs.make(id, await read_json(request, s.MakeSnapshot)), 201)

    @router.post(
        "/sandboxes/{id}/fork", **describe(types, body=s.Fork, returns=v.ForkView, status=201)
    )
    async def fork(id: str, request: Request) -> Response:
        """Make up to 20 sandboxes with the same files; all of them or none."""
        return reply(await verbs.fork(id, await read_json(request, s.Fork)), 201)

    @router.get("/sandboxes/{id}/steps", **describe(types, returns=v.StepsView))
    async def steps(id: str) -> Response:
        """The restore points that its execs have left."""
        return reply(await verbs.steps(id, s.Nothing()))

    @router.get("/sandboxes/{id}/diff", **describe(types, returns=v.DiffView))
    async def diff(
        id: str,
        old: Annotated[int, Query(alias="from", ge=0)],
        new: Annotated[int | None, Query(alias="to", ge=0)] = None,
    ) -> Response:
        """What changed between two steps, by path."""
        return reply(await verbs.diff(id, checked(s.Diff(old=old, new=new))))

    @router.post("/sandboxes/{id}/undo", **describe(types, body=s.Undo, returns=v.SandboxView))
    async def undo(id: str, request: Request) -> Response:
        """Go back to the files of a step; processes and later steps are gone."""
        return reply(await verbs.undo(id, await read_json(request, s.Undo)))

    @router.get("/snapshots", **describe(types, returns=v.SnapshotsView))
    async def list_snapshots(request: Request) -> Response:
        """All snapshots, oldest first."""
        return reply(await verbs.list(caller_of(request.scope), s.Nothing()))

    @router.get("/snapshots/{name}", **describe(types, returns=v.SnapshotView))
    async def get(request: Request, name: str) -> Response:
        """One snapshot."""
        return reply(await verbs.get(caller_of(request.scope), checked(s.OfSnapshot(name=name))))

    @router.delete("/snapshots/{name}", **describe(types, returns=v.DeletedView))
    async def delete(request: Request, name: str) -> Response:
        """Remove it; sandboxes that started from it go on."""
        return reply(await verbs.delete(caller_of(request.scope), checked(s.OfSnapshot(name=name))))

    @router.get("/snapshots/{name}/archive", **describe(types, raw=TAR))
    async def export(request: Request, name: str) -> Response:
        """The snapshot as a tar, to keep elsewhere or to import into another server."""
        return await verbs.export(caller_of(request.scope), checked(s.OfSnapshot(name=name)))

    @router.put(
        "/snapshots/{name}/archive",
        **describe(types, raw_body=TAR, returns=v.SnapshotView, status=201),
    )
    async def import_(
        name: str, request: Request, template: str | None = None, provider: str | None = None
    ) -> Response:
        """Make a snapshot of an exported one; with gzip around it or without."""
        lift(request, 0)  # what it unpacks to is limited
        wanted = checked(s.ImportSnapshot(name=name, template=template, provider=provider))
        return reply(
            await verbs.import_(caller_of(request.scope), wanted, chunks(request.receive)), 201
        )

    return router
