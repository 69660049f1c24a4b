"""REST of contexts, live interpreters. Below, S is /v1/sandboxes/{id}.

POST   S/contexts                       {"language", "cwd", "env", "imports"}: starts one
GET    S/contexts
DELETE S/contexts/{context}
POST   S/contexts/{context}/run         {"code", "timeout_ms"}: waits for the result
                                        ?stream=sse or Accept: text/event-stream: events
POST   S/contexts/run                   the same in the default context of a "language"
POST   S/contexts/{context}/interrupt   as Ctrl-C would
POST   S/contexts/{context}/restart     a fresh interpreter under the same id
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import contexts as c
from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.body import read_json
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.sse import EventStream

Streaming = Literal["sse"] | None


def context_routes(verbs: c.ContextVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/sandboxes/{id}/contexts", route_class=Route, tags=["contexts"])

    async def answer(
        request: Request, id: str, body: s.RunInContext, stream: Streaming
    ) -> Response:
        if stream or EventStream.media_type in request.headers.get("accept", ""):
            live = await verbs.open(id, body)
            return EventStream(c.run_events(live), held=live)
        return reply(await verbs.run(id, body))

    @router.post("", **describe(types, body=s.CreateContext, returns=c.ContextView, status=201))
    async def create_context(id: str, request: Request) -> Response:
        """Start an interpreter that lives on between runs."""
        return reply(await verbs.create(id, await read_json(request, s.CreateContext)), 201)

    @router.get("", **describe(types, returns=c.ContextsView))
    async def list_contexts(id: str) -> Response:
        """The sandbox's contexts, and whether they live."""
        return reply(await verbs.list(id, s.Nothing()))

    @router.post(
        "/run",
        **describe(types, body=s.RunDefault, returns=c.RunView, raw=EventStream.media_type),
    )
    async def run_in_default(id: str, request: Request, stream: Streaming = None) -> Response:
        """Run code in the default context of a language, made on first use."""
        body = c.named(await read_json(request, s.RunDefault), None)
        return await answer(request, id, body, stream)

    @router.delete("/{context}", **describe(types, returns=v.DeletedView))
    async def delete_context(id: str, context: str) -> Response:
        """End the interpreter and everything that it started."""
        return reply(await verbs.delete(id, _of(context)))

    @router.post(
        "/{context}/run",
        **describe(types, body=s.RunCode, returns=c.RunView, raw=EventStream.media_type),
    )
    async def run_in_context(
        id: str, context: str, request: Request, stream: Streaming = None
    ) -> Response:
        """Run code in a context and wait for its end, or follow it as events."""
        body = c.named(await read_json(request, s.RunCode), context)
        return await answer(request, id, body, stream)

    @router.post("/{context}/interrupt", **describe(types, returns=c.InterruptedView))
    async def interrupt(id: str, context: str) -> Response:
        """End the run that is under way, as Ctrl-C would; the context lives on."""
        return reply(await verbs.interrupt(id, _of(context)))

    @router.post("/{context}/restart", **describe(types, returns=c.ContextView))
    async def restart(id: str, context: str) -> Response:
        """Begin again with a fresh interpreter, under the same id."""
        return reply(await verbs.restart(id, _of(context)))

    return router


def _of(context: str) -> s.OfContext:
    return s.checked(s.OfContext(context=context))
