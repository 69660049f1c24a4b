"""Which scope a request needs: one table for every method and every route, and the place where it
is enforced.

A route or a method that is not in here keeps the server from starting, and fails a test: nobody
adds one without saying who may use it. Every route passes `protect`, whatever framework made it. A
path's `{id}` is a sandbox, and `protect` lets nobody pass to one of another tenant: what belongs
to others does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from capsule.edge.errors import send_error, understand
from capsule.edge.identity import caller_of
from capsule.errors import CapsuleError
from capsule.service.caller import Caller, KeyScope

READ, RUN, ADMIN = KeyScope.READ, KeyScope.RUN, KeyScope.ADMIN
ANYONE = None

METHODS: dict[str, KeyScope] = {
    "sandbox.v1.create": RUN,
    "sandbox.v1.get": READ,
    "sandbox.v1.list": READ,
    "sandbox.v1.delete": RUN,
    "sandbox.v1.setTimeout": RUN,
    "sandbox.v1.keepAlive": RUN,
    "sandbox.v1.pause": RUN,
    "sandbox.v1.resume": RUN,
    "sandbox.v1.reset": RUN,
    "sandbox.v1.snapshot": RUN,
    "sandbox.v1.fork": RUN,
    "sandbox.v1.steps": READ,
    "sandbox.v1.diff": READ,
    "sandbox.v1.undo": RUN,
    "sandbox.v1.metrics": READ,
    "sandbox.v1.exec": RUN,
    "sandbox.v1.run": RUN,
    "sandbox.v1.batch": RUN,
    "sandbox.v1.start": RUN,
    "sandbox.v1.execs": READ,
    "sandbox.v1.attach": READ,
    "sandbox.v1.kill": RUN,
    "sandbox.v1.sendInput": RUN,
    "sandbox.v1.resize": RUN,
    "sandbox.v1.writeFile": RUN,
    "sandbox.v1.readFile": READ,
    "sandbox.v1.listDir": READ,
    "sandbox.v1.stat": READ,
    "sandbox.v1.mkdir": RUN,
    "sandbox.v1.move": RUN,
    "sandbox.v1.remove": RUN,
    "sandbox.v1.chmod": RUN,
    "snapshot.v1.list": READ,
    "snapshot.v1.get": READ,
    "snapshot.v1.delete": RUN,
    "context.v1.create": RUN,
    "context.v1.run": RUN,
    "context.v1.interrupt": RUN,
    "context.v1.restart": RUN,
    "context.v1.list": READ,
    "context.v1.delete": RUN,
    "volume.v1.create": RUN,
    "volume.v1.list": READ,
    "volume.v1.get": READ,
    "volume.v1.delete": RUN,
    "template.v1.list": READ,
    "template.v1.get": READ,
    "template.v1.build": RUN,
    "template.v1.delete": RUN,
    "pool.v1.status": ADMIN,
    "webhook.v1.create": RUN,
    "webhook.v1.list": READ,
    "webhook.v1.get": READ,
    "webhook.v1.delete": RUN,
    "webhook.v1.deliveries": READ,
    "webhook.v1.redeliver": RUN,
    "tenant.v1.get": READ,  # one's own
    "tenant.v1.list": ADMIN,
    "tenant.v1.set": ADMIN,
    "audit.v1.list": ADMIN,
    "key.v1.create": ADMIN,
    "key.v1.list": ADMIN,
    "key.v1.revoke": ADMIN,
    "sandbox.create": RUN,
    "sandbox.exec": RUN,
    "sandbox.delete": RUN,
}

# Methods that change nothing: who only looks leaves no trail.
LOOKS = frozenset(
    {name for name, scope in METHODS.items() if scope is READ}
    | {"pool.v1.status", "tenant.v1.list", "audit.v1.list", "key.v1.list"}
)

_BOX = "/v1/sandboxes/{id}"
_SESSION = "/api/sessions/{session_id}"

# By path, then by method; a WebSocket is its own. HEAD is as GET.
ROUTES: dict[str, dict[str, KeyScope | None]] = {
    "/": {"GET": ANYONE},
    "/docs": {"GET": ANYONE},
    "/openapi.json": {"GET": ANYONE},
    "/health": {"GET": ANYONE},
    "/metrics": {"GET": ADMIN},
    "/v1/capabilities": {"GET": READ},
    "/v1/pool": {"GET": ADMIN},
    "/v1/sandboxes": {"GET": READ, "POST": RUN},
    _BOX: {"GET": READ, "PATCH": RUN, "DELETE": RUN},
    f"{_BOX}/keepalive": {"POST": RUN},
    f"{_BOX}/pause": {"POST": RUN},
    f"{_BOX}/resume": {"POST": RUN},
    f"{_BOX}/reset": {"POST": RUN},
    f"{_BOX}/metrics": {"GET": READ},
    f"{_BOX}/execs": {"GET": READ, "POST": RUN},
    f"{_BOX}/execs/{{exec_id}}": {"GET": READ},
    f"{_BOX}/execs/{{exec_id}}/stream": {"GET": READ},
    f"{_BOX}/execs/{{exec_id}}/kill": {"POST": RUN},
    f"{_BOX}/execs/{{exec_id}}/stdin": {"POST": RUN},
    f"{_BOX}/execs/{{exec_id}}/resize": {"POST": RUN},
    f"{_BOX}/batch": {"POST": RUN},
    f"{_BOX}/contexts": {"GET": READ, "POST": RUN},
    f"{_BOX}/contexts/run": {"POST": RUN},
    f"{_BOX}/contexts/{{context}}": {"DELETE": RUN},
    f"{_BOX}/contexts/{{context}}/run": {"POST": RUN},
    f"{_BOX}/contexts/{{context}}/interrupt": {"POST": RUN},
    f"{_BOX}/contexts/{{context}}/restart": {"POST": RUN},
    f"{_BOX}/files": {"GET": READ, "PUT": RUN, "DELETE": RUN, "PATCH": RUN},
    f"{_BOX}/files/{{path:path}}": {"GET": READ, "PUT": RUN, "DELETE": RUN, "PATCH": RUN},
    f"{_BOX}/dirs": {"GET": READ, "PUT": RUN},
    f"{_BOX}/dirs/{{path:path}}": {"GET": READ, "PUT": RUN},
    f"{_BOX}/stat": {"GET": READ},
    f"{_BOX}/stat/{{path:path}}": {"GET": READ},
    f"{_BOX}/move": {"POST": RUN},
    f"{_BOX}/archive": {"GET": READ, "PUT": RUN},
    f"{_BOX}/watch": {"GET": READ},
    f"{_BOX}/snapshots": {"POST": RUN},
    f"{_BOX}/fork": {"POST": RUN},
    f"{_BOX}/steps": {"GET": READ},
    f"{_BOX}/diff": {"GET": READ},
    f"{_BOX}/undo": {"POST": RUN},
    "/v1/snapshots": {"GET": READ},
    "/v1/snapshots/{name}": {"GET": READ, "DELETE": RUN},
    "/v1/snapshots/{name}/archive": {"GET": READ, "PUT": RUN},
    "/v1/volumes": {"GET": READ, "POST": RUN},
    "/v1/volumes/{name}": {"GET": READ, "DELETE": RUN},
    "/v1/templates": {"GET": READ},
    "/v1/templates/{name}": {"GET": READ, "DELETE": RUN},
    "/v1/templates/{name}/build": {"POST": RUN},
    "/v1/audit": {"GET": ADMIN},
    "/v1/webhooks": {"GET": READ, "POST": RUN},
    "/v1/webhooks/{webhook_id}": {"GET": READ, "DELETE": RUN},
    "/v1/webhooks/{webhook_id}/deliveries": {"GET": READ},
    "/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver": {"POST": RUN},
    "/v1/tenants": {"GET": ADMIN},
    "/v1/tenants/{tenant}": {"GET": READ, "PATCH": ADMIN},
    "/v1/keys": {"GET": ADMIN, "POST": ADMIN},
    "/v1/keys/{key_id}": {"DELETE": ADMIN},
    "/api/sessions": {"GET": READ, "POST": RUN},
    _SESSION: {"GET": READ, "DELETE": RUN},
    f"{_SESSION}/close": {"POST": RUN},
    f"{_SESSION}/reopen": {"POST": RUN},
    f"{_SESSION}/tools": {"GET": READ},
    f"{_SESSION}/tools/{{name}}": {"POST": RUN},
    f"{_SESSION}/executions": {"GET": READ},
    f"{_SESSION}/artifacts": {"GET": READ},
    f"{_SESSION}/artifacts/{{artifact_id}}": {"GET": READ},
    "/api/e2b/execute": {"POST": RUN},
    "/api/e2b/files": {"POST": RUN},
    "/api/e2b/files/{session_id}": {"GET": READ},
    "/api/registry": {"GET": READ},
    "/api/registry/{kind}": {"GET": READ},
    "/api/registry/{kind}/{name}": {"GET": READ},
    # E2B's API.
    "/v2/sandboxes": {"GET": READ, "POST": RUN},
    "/v2/sandboxes/{id}/connect": {"POST": RUN},
    "/sandboxes": {"GET": READ, "POST": RUN},
    "/sandboxes/{id}": {"GET": RUN, "DELETE": RUN},  # the answer has what opens it
    "/sandboxes/{id}/connect": {"POST": RUN},
    "/sandboxes/{id}/timeout": {"POST": RUN},
    "/sandboxes/{id}/refreshes": {"POST": RUN},
    "/sandboxes/{id}/pause": {"POST": RUN},
    "/sandboxes/{id}/resume": {"POST": RUN},
    "/sandboxes/{id}/fork": {"POST": RUN},
    "/sandboxes/{id}/network": {"PUT": RUN},
    "/sandboxes/{id}/metrics": {"GET": READ},
    "/sandboxes/metrics": {"GET": READ},
    "/sandboxes/{id}/logs": {"GET": READ},
    "/v2/sandboxes/{id}/logs": {"GET": READ},
    "/sandboxes/{id}/snapshots": {"POST": RUN},
    "/snapshots": {"GET": READ},
    "/templates/{template_id}": {"DELETE": RUN},
    "/v3/templates": {"POST": RUN},
    "/templates/{template_name}/files/{hash}": {"GET": RUN},  # the answer has where to send them
    "/v2/templates/{template_name}/builds/{build_id}": {"POST": RUN},
    "/templates/{template_name}/builds/{build_id}/status": {"GET": READ},
    "/templates": {"GET": READ},
    "/v2/templates": {"GET": READ},
    "/templates/aliases/{alias}": {"GET": READ},
    "/templates/tags": {"POST": RUN, "DELETE": RUN},
    "/templates/{template_name}/tags": {"GET": READ},
    "/secrets": {"GET": READ, "POST": RUN},
    "/secrets/{secret_id}": {"GET": READ, "POST": RUN, "DELETE": RUN},
    "/volumes": {"GET": READ, "POST": RUN},
    "/volumes/{volume_id}": {"GET": RUN, "DELETE": RUN},  # the answer has what opens it
    # Sandboxes under another name, which the routes themselves look for among the caller's.
    "/create_session": {"POST": RUN},
    "/execute": {"POST": RUN},
    "/upload": {"POST": RUN},
    "/cleanup": {"POST": RUN},
    "/api/playground/container": {"GET": READ, "POST": RUN, "DELETE": RUN},
    "/api/playground/sync": {"POST": RUN},
    "/api/playground/install": {"POST": RUN},
    "/api/playground/execute": {"POST": RUN},
    # A WebSocket goes both ways: who may only look has nothing to say in it.
    "/terminal/{id}": {"WEBSOCKET": RUN},
    "/sandbox/{id}/stream": {"WEBSOCKET": RUN},
    f"{_BOX}/exec/ws": {"WEBSOCKET": RUN},
}

Own = Callable[[Caller, str], object]  # raises NotFoundError for a sandbox of somebody else


def method_scope(name: str, scopes: Mapping[str, KeyScope] = METHODS) -> KeyScope:
    """Raises LookupError."""
    if name not in scopes:
        raise LookupError(f"method {name} has no scope: say in edge/scopes.py who may call it")
    return scopes[name]


def route_scopes(route: BaseRoute) -> dict[str, KeyScope | None]:
    """What each method of a route needs. Raises LookupError."""
    path = getattr(route, "path", "")
    known = ROUTES.get(path, {})
    found: dict[str, KeyScope | None] = {}
    for verb in _verbs(route):
        if verb not in known:
            raise LookupError(f"{verb} {path} has no scope: say in edge/scopes.py who may use it")
        found[verb] = known[verb]
    return found


def _verbs(route: BaseRoute) -> Iterable[str]:
    if isinstance(route, WebSocketRoute):
        return ["WEBSOCKET"]
    if not isinstance(route, Route):
        raise LookupError(f"{type(route).__name__} is no route of its own: list what it serves")
    return sorted({"GET" if method == "HEAD" else method for method in route.methods or ()})


def protect(web: FastAPI, own: Own, public: frozenset[str]) -> None:
    """Put the check before every route there is. Raises LookupError."""
    for route in web.router.routes:
        needed = route_scopes(route)
        served: Any = route
        if served.path not in public:
            served.app = _checked(served.app, served.path, needed, own)


def _checked(app: ASGIApp, path: str, needed: dict[str, KeyScope | None], own: Own) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check(scope, path, needed, own)
        except CapsuleError as error:
            await send_error(scope, receive, send, understand(error))
            return
        await app(scope, receive, send)

    return checked


def _check(scope: Scope, path: str, needed: dict[str, KeyScope | None], own: Own) -> None:
    verb = scope.get("method", "WEBSOCKET")
    needs = needed["GET" if verb == "HEAD" else verb]
    caller = caller_of(scope)
    if needs is not None:
        caller.require(needs, f"{verb} {path}")
    if (id := scope["path_params"].get("id")) is not None:
        own(caller, id)
