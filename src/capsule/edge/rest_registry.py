"""REST under `/api/registry`: what agents are made of, to read.

GET /api/registry                          all of it; ?format=openai for tools
GET /api/registry/environments             and …/{name}
GET /api/registry/agents                   and …/{name}
GET /api/registry/tools                    and …/{name}; ?format=openai
GET /api/registry/prompts                  and …/{name}
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

from capsule.edge import session_shapes as ss
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.session_verbs import SessionVerbs, described
from capsule.registry_file import KINDS, Tool

Kind = Literal["environments", "agents", "tools", "prompts"]
JSON = "application/json"


def registry_routes(verbs: SessionVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/api/registry", route_class=Route, tags=["registry"])

    @router.get("", **describe(types, raw=JSON))
    async def everything(format: ss.Format = "capsule") -> Response:
        """All entries, and what is wrong with files that were changed."""
        return reply(await verbs.registry(format))

    @router.get("/{kind}", **describe(types, raw=JSON))
    async def of_kind(kind: Kind, format: ss.Format = "capsule") -> Response:
        """All entries of a kind, by name; tools as a model's maker wants them, with `format`."""
        return reply({kind: (await verbs.registry(format))[kind]})

    @router.get("/{kind}/{name}", **describe(types, raw=JSON))
    async def one(kind: Kind, name: str, format: ss.Format = "capsule") -> Response:
        """One entry."""
        found: Any = await verbs.entry(KINDS[kind], name)
        return reply(described(found, format) if isinstance(found, Tool) else found)

    return router
