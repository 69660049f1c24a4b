"""E2B's secrets: kept, and told of by name. Nothing here fills them in: E2B does that where a
sandbox reaches the internet, and these reach nothing.

POST   /secrets               {"name", "value", "metadata"?}
GET    /secrets               page by page
POST   /secrets/{secret_id}   {"value", "metadata"?}: the next version; by id or name, as the others
GET    /secrets/{secret_id}
DELETE /secrets/{secret_id}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from msgspec import field
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.body import read_json
from capsule.edge.e2b import pages
from capsule.edge.e2b.control_shapes import Body
from capsule.edge.e2b.control_views import View
from capsule.edge.e2b.described import Describe
from capsule.edge.errors import invalid_field
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, reply
from capsule.service.vault import Secret, Vault

Limit = Annotated[int, Query(ge=1, le=pages.MOST)]
Token = Annotated[str, Query(alias="nextToken", max_length=400)]
_FILLED = "${e2b.secrets."


class E2bNewSecret(Body, kw_only=True, frozen=True):
    name: str
    value: str
    metadata: dict[str, str] | None = None


class E2bNewVersion(Body, kw_only=True, frozen=True):
    value: str
    metadata: dict[str, str] | None = None


class E2bSecret(View, frozen=True, kw_only=True):
    secret_id: str = field(name="secretID")
    name: str
    current_version: int
    metadata: Mapping[str, str]
    created_at: datetime
    updated_at: datetime


def view(secret: Secret) -> E2bSecret:
    return E2bSecret(
        secret_id=secret.id,
        name=secret.name,
        current_version=secret.version,
        metadata=secret.metadata,
        created_at=secret.created_at,
        updated_at=secret.updated_at,
    )


def check_no_secret(where: str, texts: Iterable[str]) -> None:
    """Raises InvalidError: nobody would fill it in."""
    if any(_FILLED in text for text in texts):
        raise invalid_field(
            where,
            f"has {_FILLED}…}} in it, which is filled in where a sandbox reaches the internet, and"
            " sandboxes of this server have no network",
            hint="give the value itself, if the program in the sandbox may know it",
        )


def secret_routes(vault: Vault, types: Described) -> APIRouter:
    router = APIRouter(route_class=Route, tags=["e2b"])
    described = Describe(types)

    @router.post("/secrets", **described(E2bNewSecret, E2bSecret, 201))
    async def create(request: Request) -> Response:
        """Keep a secret. Its value is never told again."""
        body, tenant = await read_json(request, E2bNewSecret), caller_of(request.scope).tenant
        made = await vault.create(tenant, body.name, body.value, body.metadata or {})
        return reply(view(made), 201)

    @router.get("/secrets", **described(returns=E2bSecret, many=True))
    async def list_secrets(
        request: Request, limit: Limit = pages.PAGE, token: Token = ""
    ) -> Response:
        """List secrets, newest first."""
        known = await vault.list(caller_of(request.scope).tenant)
        found = pages.page(known, lambda each: (each.created, each.id), limit=limit, token=token)
        answer = reply([view(each) for each in found.items])
        if found.next_token is not None:
            answer.headers["x-next-token"] = found.next_token
        return answer

    @router.post("/secrets/{secret_id}", **described(E2bNewVersion, E2bSecret))
    async def update(secret_id: str, request: Request) -> Response:
        """The next version of a secret."""
        tenant = caller_of(request.scope).tenant
        await vault.find(tenant, secret_id)
        body = await read_json(request, E2bNewVersion)
        return reply(view(await vault.update(tenant, secret_id, body.value, body.metadata)))

    @router.get("/secrets/{secret_id}", **described(returns=E2bSecret))
    async def get(secret_id: str, request: Request) -> Response:
        """A secret, without its value."""
        return reply(view(await vault.find(caller_of(request.scope).tenant, secret_id)))

    @router.delete("/secrets/{secret_id}", **described(status=204))
    async def delete(secret_id: str, request: Request) -> Response:
        """Forget a secret."""
        await vault.delete(caller_of(request.scope).tenant, secret_id)
        return Response(status_code=204)

    return router
