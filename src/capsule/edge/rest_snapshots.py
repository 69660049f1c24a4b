"""REST under `/v1`: snapshots and forks.

POST   /v1/sandboxes/{id}/snapshots   {"name": …}: keep its files under this name
POST   /v1/sandboxes/{id}/fork        {"count": n}: up to 20 copies
GET    /v1/snapshots
GET    /v1/snapshots/{name}
DELETE /v1/snapshots/{name}
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.body import read_json
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

    @router.get("/snapshots", **describe(types, returns=v.SnapshotsView))
    async def list_snapshots() -> Response:
        """All snapshots, oldest first."""
        return reply(await verbs.list(s.Nothing()))

    @router.get("/snapshots/{name}", **describe(types, returns=v.SnapshotView))
    async def get(name: str) -> Response:
        """One snapshot."""
        return reply(await verbs.get(checked(s.OfSnapshot(name=name))))

    @router.delete("/snapshots/{name}", **describe(types, returns=v.DeletedView))
    async def delete(name: str) -> Response:
        """Remove it; sandboxes that started from it go on."""
        return reply(await verbs.delete(checked(s.OfSnapshot(name=name))))

    return router
