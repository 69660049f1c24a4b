"""REST under `/v1`: keys, for admins.

POST   /v1/keys            {"tenant", "scopes", "name", "ttl_ms"}: the answer has the key, once
GET    /v1/keys            ?tenant=acme
DELETE /v1/keys/{key_id}   revoke it: refused from then on, and still listed
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.body import read_json
from capsule.edge.identity import caller_of
from capsule.edge.keys import CreateKey, KeysView, KeyVerbs, KeyView, ListKeys, OfKey
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.shapes import checked


def key_routes(verbs: KeyVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/keys", route_class=Route, tags=["keys"])

    @router.post("", **describe(types, body=CreateKey, returns=KeyView, status=201))
    async def create(request: Request) -> Response:
        """Make a key. It is in this answer, and can never be read again."""
        body = await read_json(request, CreateKey)
        return reply(await verbs.create(caller_of(request.scope), body), 201)

    @router.get("", **describe(types, returns=KeysView))
    async def list_keys(request: Request, tenant: str | None = None) -> Response:
        """All keys, oldest first, also those that are over; without their secrets."""
        return reply(await verbs.list(caller_of(request.scope), checked(ListKeys(tenant=tenant))))

    @router.delete("/{key_id}", **describe(types, returns=KeyView))
    async def revoke(request: Request, key_id: str) -> Response:
        """Refuse it from now on."""
        return reply(await verbs.revoke(caller_of(request.scope), checked(OfKey(key_id=key_id))))

    return router
