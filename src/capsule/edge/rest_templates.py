"""REST under `/v1`: templates.

GET    /v1/templates
GET    /v1/templates/{name}         with its images
DELETE /v1/templates/{name}         one that was built or imported
POST   /v1/templates/{name}/build   the body is the build context, a tar; none: the Dockerfile
                                    that Capsule brings. Waits for the end; with ?stream=sse or
                                    Accept: text/event-stream it tells how it goes:
    event: step    {"number", "total", "text"}
    event: log     {"text"}                       what the step printed, as it came
    event: fetch   {"part", "status", "current", "total"}    of a base image
    event: built   {"template", "image", "log"}   the end
    event: error   {"code", "message", …}         the end; `details` name the step
A client that leaves cancels the build.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.body import advise, chunks, lift
from capsule.edge.download import TAR
from capsule.edge.errors import invalid_field, told, understand
from capsule.edge.identity import caller_of
from capsule.edge.presence import while_there
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.shapes import checked
from capsule.edge.sse import EventStream, event
from capsule.edge.template_verbs import TemplateVerbs
from capsule.edge.template_views import BuiltView, TemplateInfoView, TemplatesView
from capsule.service.templates import Said


def template_routes(verbs: TemplateVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/templates", route_class=Route, tags=["templates"])

    @router.get("", **describe(types, returns=TemplatesView))
    async def list_templates(request: Request) -> Response:
        """What sandboxes can start from."""
        return reply(await verbs.list(caller_of(request.scope), s.Nothing()))

    @router.get("/{name}", **describe(types, returns=TemplateInfoView))
    async def get(request: Request, name: str) -> Response:
        """One template, and its images."""
        return reply(await verbs.get(caller_of(request.scope), s.OfTemplate(name=name)))

    @router.delete("/{name}", **describe(types, returns=v.DeletedView))
    async def delete(request: Request, name: str) -> Response:
        """Remove a template that was built or imported, and its images. A `conflict` names the
        sandboxes that still run from it.
        """
        return reply(await verbs.delete(caller_of(request.scope), s.OfTemplate(name=name)))

    @router.post(
        "/{name}/build",
        **describe(types, raw_body=TAR, returns=BuiltView, raw=EventStream.media_type),
    )
    async def build(
        name: str,
        request: Request,
        file: str = "Dockerfile",
        arg: Annotated[list[str] | None, Query()] = None,
        cache: bool = True,
        pull: bool = False,
        provider: str | None = None,
        stream: Literal["sse"] | None = None,
    ) -> Response:
        """Build a template's image from the Dockerfile in a tar, and wait for the end or follow it
        as events. Without a body, from the one that Capsule brings.
        """
        lift(request, verbs.config.max_context)
        advise(request, "leave out what the build does not need, or raise max_context")
        args = _pairs(arg or [])
        shape = s.BuildOptions(
            name=name, file=file, args=args, cache=cache, pull=pull, provider=provider
        )
        options = checked(shape)
        async with AsyncExitStack() as stack:
            context = await verbs.received(chunks(request.receive), stack)
            words = verbs.start(caller_of(request.scope), options, context)
            stack.push_async_callback(words.aclose)
            if stream or EventStream.media_type in request.headers.get("accept", ""):
                # What is wrong from the start is still an answer of its own.
                first = await while_there(anext(words), request.receive)
                held = stack.pop_all()
                return EventStream(_events(verbs, first, words), held=held)
            return reply(await while_there(verbs.finish(words), request.receive))

    return router


async def _events(
    verbs: TemplateVerbs, first: Said, words: AsyncGenerator[Said, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield verbs.as_event(first)
        async for said in words:
            yield verbs.as_event(said)
    except Exception as error:  # the response has begun: the stream itself must say it
        yield event("error", told(understand(error)))


def _pairs(items: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise invalid_field("arg", f"expected KEY=VALUE, got {item[:60]!r}")
        pairs[key] = value
    return pairs
