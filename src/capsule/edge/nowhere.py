"""Requests that no route takes: an unknown path, or a method or protocol that it does not speak."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, WebSocketRoute
from starlette.types import Receive, Scope, Send

from capsule.edge.errors import HttpError, is_e2b, send_error, understand, wrong_method
from capsule.edge.routing import failure

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def answer_the_lost(web: FastAPI) -> None:
    routes = web.router.routes

    async def no_path(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(scope, receive, send, _no_path(routes, scope))

    async def no_method(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            # Starlette names the methods of one route; a path may have several.
            tried = ((method, {**request.scope, "method": method}) for method in METHODS)
            allowed = [method for method, scope in tried if _has(routes, scope)]
            error = wrong_method(request.method, allowed)
        return failure(understand(error), e2b=is_e2b(request.scope))

    web.router.default = no_path
    web.add_exception_handler(HTTPException, no_method)


def _no_path(routes: list[BaseRoute], scope: Scope) -> HttpError:
    if scope["type"] == "websocket":
        sockets = ", ".join(route.path for route in routes if isinstance(route, WebSocketRoute))
        what = f"no WebSocket at this path: {scope['path'][:100]}"
        return HttpError(404, "not_found", what, hint=f"WebSockets are at {sockets}")
    if _has(routes, {**scope, "type": "websocket"}):
        return HttpError(
            426,
            "invalid",
            "this path is a WebSocket",
            hint="connect to it with ws:// instead of http://",
            headers={"upgrade": "websocket"},
        )
    what = f"no such path: {scope['path'][:100]}"
    return HttpError(404, "not_found", what, hint="GET /docs lists every path")


def _has(routes: list[BaseRoute], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)
