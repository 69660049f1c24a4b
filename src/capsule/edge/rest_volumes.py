"""REST under `/v1`: volumes.

POST   /v1/volumes          {"name": …}
GET    /v1/volumes
GET    /v1/volumes/{name}
DELETE /v1/volumes/{name}   with all that is in it; a conflict while a sandbox has it
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.body import read_json
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.shapes import checked
from capsule.edge.volume_verbs import VolumeVerbs


def volume_routes(verbs: VolumeVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/volumes", route_class=Route, tags=["volumes"])

    @router.post("", **describe(types, body=s.MakeVolume, returns=v.VolumeView, status=201))
    async def create(request: Request) -> Response:
        """Make an empty volume."""
        body = await read_json(request, s.MakeVolume)
        return reply(await verbs.create(caller_of(request.scope), body), 201)

    @router.get("", **describe(types, returns=v.VolumesView))
    async def list_volumes(request: Request) -> Response:
        """All volumes, oldest first."""
        return reply(await verbs.list(caller_of(request.scope), s.Nothing()))

    @router.get("/{name}", **describe(types, returns=v.VolumeView))
    async def get(request: Request, name: str) -> Response:
        """One volume."""
        return reply(await verbs.get(caller_of(request.scope), checked(s.OfVolume(name=name))))

    @router.delete("/{name}", **describe(types, returns=v.DeletedView))
    async def delete(request: Request, name: str) -> Response:
        """Remove it with all that is in it; a `conflict` names the sandboxes that have it."""
        return reply(await verbs.delete(caller_of(request.scope), checked(s.OfVolume(name=name))))

    return router
