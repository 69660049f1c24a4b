"""E2B's volumes: ours, by their id. What is in them is `volume_content`'s.

POST   /volumes                {"name"}
GET    /volumes
GET    /volumes/{volume_id}    with the token that opens its content
DELETE /volumes/{volume_id}    with all that is in it; a conflict while a sandbox has it
"""

from __future__ import annotations

from fastapi import APIRouter
from msgspec import field
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.body import read_json
from capsule.edge.drain import Gate
from capsule.edge.e2b import control_shapes as s
from capsule.edge.e2b import control_views as v
from capsule.edge.e2b.access import Access
from capsule.edge.e2b.described import Describe
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, reply
from capsule.errors import NotFoundError
from capsule.model import GIB
from capsule.service import Service, Volume
from capsule.service.caller import Caller
from capsule.service.volumes import LEAST_SIZE
from capsule.settings import brief

SIZE = GIB  # of one whose tenant has a quota; E2B has no word for it


class E2bNewVolume(s.Body, kw_only=True, frozen=True):
    name: s.Name


class E2bVolume(v.View, frozen=True, kw_only=True):
    volume_id: str = field(name="volumeID")
    name: str


class E2bVolumeAndToken(E2bVolume, frozen=True, kw_only=True):
    token: str


class VolumeCalls:
    def __init__(self, service: Service, gate: Gate, access: Access) -> None:
        self._service = service
        self._gate = gate
        self._access = access

    async def create(self, caller: Caller, p: E2bNewVolume) -> E2bVolumeAndToken:
        self._gate.admit()
        left = self._service.quotas.storage_left(caller.tenant)
        size = None if left is None else max(min(SIZE, left), LEAST_SIZE)
        made = await self._service.volumes.create(p.name, size=size, tenant=caller.tenant)
        return self._opened(made)

    def list(self, caller: Caller) -> list[E2bVolume]:
        found = self._service.volumes.list(caller.tenant)
        return [E2bVolume(volume_id=each.id, name=each.name) for each in found]

    def get(self, caller: Caller, id: str) -> E2bVolumeAndToken:
        return self._opened(self._own(caller, id))

    async def delete(self, caller: Caller, id: str) -> None:
        await self._service.volumes.delete(self._own(caller, id).name, caller.tenant)

    def _own(self, caller: Caller, id: str) -> Volume:
        """Raises NotFoundError."""
        for each in self._service.volumes.list(caller.tenant):
            if each.id == id:
                return each
        raise NotFoundError(f"volume {brief(id)} does not exist", hint="list the volumes")

    def _opened(self, volume: Volume) -> E2bVolumeAndToken:
        token = self._access.volume_token(volume.id)
        return E2bVolumeAndToken(volume_id=volume.id, name=volume.name, token=token)


def volume_routes(calls: VolumeCalls, types: Described) -> APIRouter:
    router = APIRouter(route_class=Route, tags=["e2b"])
    described = Describe(types)

    @router.post("/volumes", **described(E2bNewVolume, E2bVolumeAndToken, 201))
    async def create(request: Request) -> Response:
        """Make an empty volume."""
        body = await read_json(request, E2bNewVolume)
        return reply(await calls.create(caller_of(request.scope), body), 201)

    @router.get("/volumes", **described(returns=E2bVolume, many=True))
    async def list_volumes(request: Request) -> Response:
        """List volumes, oldest first."""
        return reply(calls.list(caller_of(request.scope)))

    @router.get("/volumes/{volume_id}", **described(returns=E2bVolumeAndToken))
    async def get(volume_id: str, request: Request) -> Response:
        """A volume, and the token that opens its content."""
        return reply(calls.get(caller_of(request.scope), volume_id))

    @router.delete("/volumes/{volume_id}", **described(status=204))
    async def delete(volume_id: str, request: Request) -> Response:
        """Delete a volume with all that is in it."""
        await calls.delete(caller_of(request.scope), volume_id)
        return Response(status_code=204)

    return router
