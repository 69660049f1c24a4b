"""REST under `/v1`: who did what, for admins.

GET    /v1/audit   ?tenant= &sandbox= &before=SEQ &limit=: the newest first
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.shapes import checked
from capsule.edge.trail import ListTrail, TrailVerbs, TrailView


def trail_routes(verbs: TrailVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/audit", route_class=Route, tags=["audit"])

    @router.get("", **describe(types, returns=TrailView))
    async def entries(
        request: Request,
        tenant: str | None = None,
        sandbox: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> Response:
        """Every call that changed something, and what happened to sandboxes, the newest first."""
        asked = ListTrail(tenant=tenant, sandbox=sandbox, before=before, limit=limit)
        return reply(await verbs.list(caller_of(request.scope), checked(asked)))

    return router
