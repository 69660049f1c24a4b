"""REST under `/v1`: tenants, what they may use and what they do.

GET    /v1/tenants            all there are, for admins
GET    /v1/tenants/{tenant}   one's own; any, for admins
PATCH  /v1/tenants/{tenant}   {"sandboxes", "execs", "memory", "cpu_seconds", "storage"}, for admins
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import shapes as s
from capsule.edge.body import read_json
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.tenants import NewQuota, OfTenant, TenantsView, TenantVerbs, TenantView, named


def tenant_routes(verbs: TenantVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/tenants", route_class=Route, tags=["tenants"])

    @router.get("", **describe(types, returns=TenantsView))
    async def list_tenants(request: Request) -> Response:
        """Everybody who has a key, a quota or anything else, by name."""
        return reply(await verbs.list(caller_of(request.scope), s.Nothing()))

    @router.get("/{tenant}", **describe(types, returns=TenantView))
    async def get(request: Request, tenant: str) -> Response:
        """What a tenant may use, and uses now."""
        wanted = s.checked(OfTenant(tenant=tenant))
        return reply(await verbs.get(caller_of(request.scope), wanted))

    @router.patch("/{tenant}", **describe(types, body=NewQuota, returns=TenantView))
    async def set_quota(request: Request, tenant: str) -> Response:
        """Give it other quotas. What is not named stays; `reset` forgets first what was set."""
        body = named(await read_json(request, NewQuota), tenant)
        return reply(await verbs.set(caller_of(request.scope), body))

    return router
