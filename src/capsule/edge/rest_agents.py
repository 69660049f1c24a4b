"""Plain REST for agents. See `agents`.

POST /create_session    → {"session_id"}: 512 MiB, half a core, one hour, no network
POST /execute           {"session_id", "command"} → {"exit_code", "output"}
POST /upload            a form: session_id, then files
POST /cleanup           {"session_id"}
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import agents as a
from capsule.edge.body import lift, read_json
from capsule.edge.identity import caller_of
from capsule.edge.multipart import MEDIA_TYPE, parts
from capsule.edge.rest import IdempotencyKey
from capsule.edge.routing import Described, Route, describe, reply

FORM = "with curl: -F session_id=ID -F file=@NAME"


def agent_routes(verbs: a.AgentVerbs, types: Described) -> APIRouter:
    router = APIRouter(route_class=Route, tags=["agents"])

    @router.post("/create_session", **describe(types, body=a.CreateSession, returns=a.SessionView))
    async def create_session(request: Request, key: IdempotencyKey = None) -> Response:
        """Make a sandbox for an agent: 512 MiB of memory, half a core, no network. It ends after
        one hour.
        """
        body = await read_json(request, a.CreateSession, plain=True)
        return reply(await verbs.create(caller_of(request.scope), body, key))

    @router.post("/execute", **describe(types, body=a.ExecuteCommand, returns=a.CommandView))
    async def execute(request: Request, key: IdempotencyKey = None) -> Response:
        """Run a shell command in /workspace. Files stay for the next one; the directory and
        variables do not.
        """
        body = await read_json(request, a.ExecuteCommand, plain=True)
        return reply(await verbs.execute(caller_of(request.scope), body, key))

    @router.post("/upload", **describe(types, raw_body=MEDIA_TYPE, returns=a.UploadedView))
    async def upload(request: Request) -> Response:
        """Put files into a session's /workspace: a form with `session_id`, and then one file or
        more. A field `path` says where the file after it goes; by default under its own name.
        """
        lift(request, verbs.config.max_upload)
        return reply(await verbs.upload(caller_of(request.scope), parts(request, hint=FORM)))

    @router.post("/cleanup", **describe(types, body=a.OfSession, returns=a.CleanedView))
    async def cleanup(request: Request) -> Response:
        """End a session; nothing of it is left when the answer comes."""
        body = await read_json(request, a.OfSession, plain=True)
        return reply(await verbs.cleanup(caller_of(request.scope), body))

    return router
