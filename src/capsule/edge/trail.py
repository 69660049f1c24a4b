"""What an admin can ask of the trail, once for JSON-RPC and REST."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from capsule.audit.trail import Trail
from capsule.edge.shapes import Shape, Word
from capsule.edge.views import View
from capsule.service.caller import Caller


class ListTrail(Shape, kw_only=True, frozen=True):
    tenant: Word | None = None
    sandbox: Word | None = None
    before: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class TrailView(View, frozen=True, kw_only=True):
    entries: list[dict[str, Any]]


class TrailVerbs:
    def __init__(self, trail: Trail) -> None:
        self._trail = trail

    async def list(self, caller: Caller, p: ListTrail) -> TrailView:
        found = await self._trail.entries(
            tenant=p.tenant, sandbox=p.sandbox, before=p.before, most=p.limit
        )
        return TrailView(entries=found)
