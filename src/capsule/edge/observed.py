"""The outermost layer: every request gets an id, which is in its answer and in every line that is
logged for it, and is counted by its route once it is answered.

The id is the client's own `X-Request-Id`, if it is a plain word, else a new one. Routes are those
of the table, not what was asked for: nobody can make up new ones by asking.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capsule.audit.trail import Trail
from capsule.edge.identity import ADDRESS, CALLER
from capsule.edge.scopes import LOOKS
from capsule.service import Happening, Spread
from capsule.service.caller import Caller
from capsule.tracing import request_span

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger(__name__)

HEADER = b"x-request-id"
NOWHERE = "none"  # no route has this path
_PLAIN = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
# Answered by who knows no routes.
_OWN = frozenset({"/rpc", "/metrics", "/openapi.json", "/docs", "/"})


class Request(NamedTuple):
    method: str
    route: str
    status: int


class Observed:
    """What was asked and how it was answered, since the server started."""

    def __init__(self, trail: Trail, *, log: bool = False) -> None:
        self._trail = trail
        self._log = log
        self.calls: Counter[tuple[str, str]] = Counter()  # JSON-RPC: method, and how it went
        self.call_seconds: defaultdict[str, Spread] = defaultdict(Spread)
        self.requests: Counter[Request] = Counter()
        # By method and route, until the answer begins.
        self.seconds: defaultdict[tuple[str, str], Spread] = defaultdict(Spread)
        self.open = 0  # not answered to their end yet, WebSockets among them

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            id = _id_of(scope)
            began, status = time.perf_counter(), 0

            async def answer(message: Message) -> None:
                nonlocal status
                if message["type"] in _STARTS and not status:
                    status = message.get("status", 101)
                    message["headers"] = [*message.get("headers", ()), (HEADER, id)]
                    self._count(scope, status, time.perf_counter() - began)
                await send(message)

            self.open += 1
            structlog.contextvars.bind_contextvars(request=id.decode())
            try:
                with request_span("request", scope["headers"]) as span:
                    await app(scope, receive, answer)
                    if span is not None:
                        _describe(span, scope, status, id)
            finally:
                self.open -= 1
                structlog.contextvars.unbind_contextvars("request", "tenant", "key")

        return observed

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        request = Request(scope.get("method", "WS"), route_of(scope), status)
        self.requests[request] += 1
        self.seconds[request.method, request.route].add(seconds)
        if request.method not in _LOOKS and request.route not in ("/rpc", NOWHERE):
            self._note(scope, f"{request.method} {request.route}", status)
        if self._log:
            ms = round(seconds * 1000, 2)
            log.info("request", **request._asdict(), ms=ms, **_subjects(scope))

    def _note(self, scope: Scope, what: str, status: int) -> None:
        caller: Caller | None = scope.get(CALLER)
        if caller is not None:
            subjects = {"address": scope.get(ADDRESS, ""), **_subjects(scope)}
            self._trail.note(what, tenant=caller.tenant, status=status, **subjects)

    def called(self, call: str, caller: Caller, on: str | None, error: str, seconds: float) -> None:
        """A call of JSON-RPC; `on` is its sandbox."""
        self.calls[call, error or "ok"] += 1
        self.call_seconds[call].add(seconds)
        if call not in LOOKS:
            self._trail.note(call, tenant=caller.tenant, sandbox=on or "", error=error)
        if self._log:
            log.info("call", call=call, sandbox=on, error=error, ms=round(seconds * 1000, 2))


_LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
_STARTS = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start", "websocket.close"}
)


def _describe(span: Span, scope: Scope, status: int, id: bytes) -> None:
    """Known at the end alone: the route, and whose request it was."""
    method, caller = scope.get("method", "WS"), scope.get(CALLER)
    span.update_name(f"{method} {route_of(scope)}")
    span.set_attribute("http.request.method", method)
    span.set_attribute("http.route", route_of(scope))
    span.set_attribute("http.response.status_code", status)
    span.set_attribute("capsule.request", id.decode())
    if caller is not None:
        span.set_attribute("capsule.tenant", caller.tenant)
    for name, value in _subjects(scope).items():
        span.set_attribute(f"capsule.{name}", value)


def _subjects(scope: Scope) -> dict[str, str]:
    """Which sandbox, and which exec, as the path has it."""
    found = scope.get("path_params") or {}
    return {
        name: str(found[key])
        for name, key in (("sandbox", "id"), ("exec", "exec_id"))
        if key in found
    }


def log_happening(happening: Happening) -> None:
    told: dict[str, object] = {
        "tenant": happening.tenant,
        "sandbox": happening.sandbox,
        "template": happening.template,
    }
    if happening.reason:
        told["reason"] = happening.reason
    if happening.exec is not None:
        exit = happening.exec.exit
        told |= {"exec": happening.exec.id, "reason": str(exit.reason), "code": exit.exit_code}
        told["ms"] = exit.duration_ms
    log.info(happening.kind, **told)


def route_of(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", None)
    if path is not None:
        return str(path)
    return scope["path"] if scope["path"] in _OWN else NOWHERE


def _id_of(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == HEADER and _PLAIN.fullmatch(value):
            found: bytes = value
            return found
    return secrets.token_hex(8).encode()
