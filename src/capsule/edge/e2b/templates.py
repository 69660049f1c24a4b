"""E2B's templates: built from steps by a Docker Engine, named and tagged.

POST   /v3/templates                                      {"name", "tags"?, "cpuCount"?, …}
GET    /templates/{template_name}/files/{hash}            where to send the files of a step
POST   /v2/templates/{template_name}/builds/{build_id}    begin; it goes on by itself
GET    /templates/{template_name}/builds/{build_id}/status   ?logsOffset=&limit=
GET    /templates, /v2/templates
GET    /templates/aliases/{alias}                         whether there is one
POST   /templates/tags                                    {"target": "name:tag", "tags"}
DELETE /templates/tags                                    {"name", "tags"}
GET    /templates/{template_name}/tags
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.body import read_json
from capsule.edge.e2b import template_calls as c
from capsule.edge.e2b.described import Describe
from capsule.edge.e2b.script import E2bBuild
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, reply

Offset = Annotated[int, Query(alias="logsOffset", ge=0, lt=2**31)]
Limit = Annotated[int, Query(ge=0, le=1000)]


def e2b_template_routes(calls: c.TemplateCalls, types: Described) -> APIRouter:
    router = APIRouter(route_class=Route, tags=["e2b"])
    described = Describe(types)

    @router.post("/v3/templates", **described(c.E2bNewTemplate, c.E2bRequested, 202))
    async def request_build(request: Request) -> Response:
        """Ask for a build of a template, which is then begun."""
        body = await read_json(request, c.E2bNewTemplate)
        return reply(calls.request(caller_of(request.scope), body), 202)

    @router.get("/templates/{template_name}/files/{hash}", **described(None, c.E2bUpload, 201))
    async def upload(template_name: str, hash: str, request: Request) -> Response:
        """Where to send the files of a step, and whether they are there already."""
        base = f"{request.url.scheme}://{request.headers.get('host', 'localhost')}"
        return reply(await calls.upload(caller_of(request.scope), hash, base), 201)

    @router.post(
        "/v2/templates/{template_name}/builds/{build_id}", **described(E2bBuild, status=202)
    )
    async def start(template_name: str, build_id: str, request: Request) -> Response:
        """Begin a build. It goes on by itself."""
        body = await read_json(request, E2bBuild)
        await calls.start(caller_of(request.scope), template_name, build_id, body)
        return Response(status_code=202)

    @router.get(
        "/templates/{template_name}/builds/{build_id}/status",
        **described(returns=c.E2bBuildInfo),
    )
    async def status(
        template_name: str,
        build_id: str,
        request: Request,
        offset: Offset = 0,
        limit: Limit = c.PAGE,
    ) -> Response:
        """How a build goes, and what it has said from an entry on."""
        caller = caller_of(request.scope)
        return reply(calls.status(caller, template_name, build_id, offset=offset, limit=limit))

    @router.get("/templates", **described(returns=c.E2bTemplate, many=True))
    async def list_templates(request: Request) -> Response:
        """List templates."""
        return reply(await calls.list(caller_of(request.scope)))

    @router.get("/v2/templates", **described(returns=c.E2bTemplate, many=True))
    async def list_templates_v2(request: Request) -> Response:
        """List templates."""
        return reply(await calls.list(caller_of(request.scope)))

    @router.get("/templates/aliases/{alias}", **described(returns=c.E2bAlias))
    async def alias(alias: str, request: Request) -> Response:
        """Whether there is a template of this name."""
        return reply(await calls.alias(caller_of(request.scope), alias))

    @router.post("/templates/tags", **described(c.E2bTagging, c.E2bTagged, 201))
    async def tag(request: Request) -> Response:
        """Give further tags to what a tag stands for."""
        body = await read_json(request, c.E2bTagging)
        return reply(await calls.tag(caller_of(request.scope), body), 201)

    @router.delete("/templates/tags", **described(c.E2bUntagging, status=204))
    async def untag(request: Request) -> Response:
        """Take tags away; what has none any more is removed."""
        await calls.untag(caller_of(request.scope), await read_json(request, c.E2bUntagging))
        return Response(status_code=204)

    @router.get("/templates/{template_name}/tags", **described(returns=c.E2bTag, many=True))
    async def tags(template_name: str, request: Request) -> Response:
        """The tags of a template, and the builds that they stand for."""
        return reply(await calls.tags(caller_of(request.scope), template_name))

    return router
