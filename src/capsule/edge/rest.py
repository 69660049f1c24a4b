"""REST under `/v1`: sandboxes and execs. Files are in `rest_files`, templates in `rest_templates`.
Below, S is /v1/sandboxes/{id}.

POST   /v1/sandboxes                create; Idempotency-Key
GET    /v1/sandboxes                list; ?state=running&metadata=key=value
GET    S                            get
PATCH  S                            {"ttl_ms": n}: it ends that long from now
POST   S/keepalive                  its whole TTL again, from now
POST   S/pause, S/resume            its programs stand still, and go on
POST   S/reset                      as new: no processes, files or sessions; its TTL goes on
DELETE S
GET    S/metrics
POST   S/execs                      {"cmd": …} or {"code": …}: waits for the result; Idempotency-Key
                                    ?stream=sse or Accept: text/event-stream: events (see `sse`)
                                    ?wait=false, or with stdin_open or tty: 202 and its id at once
GET    S/execs
GET    S/execs/{exec_id}            ?output=true: with what it wrote so far
GET    S/execs/{exec_id}/stream     events, from Last-Event-ID or ?stdout=&stderr= offsets on;
                                    ?encoding=base64
POST   S/execs/{exec_id}/kill       {"signal": "TERM", "grace_ms": 2000}
POST   S/execs/{exec_id}/stdin      the body is the input, as it is, up to max_body (16 MiB);
                                    ?eof=true closes it
POST   S/execs/{exec_id}/resize     {"rows": 40, "cols": 120}
POST   S/batch                      {"commands": […], "stop_on_error": true}
GET    /v1/pool                     what is ready to be used, and who waits
GET    /metrics                     numbers for Prometheus; the setting `metrics` says for whom
GET    /v1/capabilities             what this host can do: `capsule doctor` as JSON
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import metrics
from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.body import advise, read_body, read_json
from capsule.edge.errors import invalid_field
from capsule.edge.identity import caller_of
from capsule.edge.presence import client
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.server_views import CapabilitiesView, HealthView, ProviderView
from capsule.edge.sse import EventStream, exec_events, parse_event_id
from capsule.edge.verbs import Verbs
from capsule.errors import InvalidError
from capsule.model import Usage
from capsule.service import PoolStatus
from capsule.settings import brief

IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", max_length=255)]
Encoding = Literal["text", "base64"]
State = Literal["creating", "running", "paused", "stopping", "gone", "failed"]


class NewSize(s.Shape, kw_only=True, frozen=True):
    rows: s.Side
    cols: s.Side


def sandbox_routes(verbs: Verbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/sandboxes", route_class=Route, tags=["sandboxes"])

    @router.post("", **describe(types, body=s.Create, returns=v.SandboxView, status=201))
    async def create(request: Request, key: IdempotencyKey = None) -> Response:
        """Create a sandbox; it runs when the answer comes."""
        body = _keyed(await read_json(request, s.Create), key)
        client.set(request.receive)
        return reply(await verbs.create(caller_of(request.scope), body), 201)

    @router.get("", **describe(types, returns=v.SandboxesView))
    async def list_sandboxes(
        request: Request,
        state: State | None = None,
        metadata: Annotated[list[str] | None, Query()] = None,
        tenant: Annotated[str | None, Query(max_length=64)] = None,
    ) -> Response:
        """List sandboxes, oldest first; `metadata=key=value` may be repeated."""
        shape = s.ListSandboxes(state=state, metadata=_pairs(metadata or []), tenant=tenant)
        return reply(await verbs.list(caller_of(request.scope), s.checked(shape)))

    @router.get("/{id}", **describe(types, returns=v.SandboxView))
    async def get(id: str) -> Response:
        """A sandbox as it is now."""
        return reply(await verbs.get(id, s.Nothing()))

    @router.patch("/{id}", **describe(types, body=s.SetTimeout, returns=v.SandboxView))
    async def set_timeout(id: str, request: Request) -> Response:
        """Let it end `ttl_ms` from now."""
        return reply(await verbs.set_timeout(id, await read_json(request, s.SetTimeout)))

    @router.post("/{id}/keepalive", **describe(types, returns=v.SandboxView))
    async def keep_alive(id: str) -> Response:
        """Let it live for its whole TTL from now on."""
        return reply(await verbs.keep_alive(id, s.Nothing()))

    @router.post("/{id}/pause", **describe(types, returns=v.SandboxView))
    async def pause(id: str) -> Response:
        """Let everything in it stand still; memory and processes are kept."""
        return reply(await verbs.pause(id, s.Nothing()))

    @router.post("/{id}/resume", **describe(types, returns=v.SandboxView))
    async def resume(id: str) -> Response:
        """Let it go on."""
        return reply(await verbs.resume(id, s.Nothing()))

    @router.post("/{id}/reset", **describe(types, returns=v.SandboxView))
    async def reset(id: str) -> Response:
        """Give it back its template's state: programs, files and sessions are gone when the answer
        comes. Its id and its TTL stay.
        """
        return reply(await verbs.reset(id, s.Nothing()))

    @router.delete("/{id}", **describe(types, returns=v.DeletedView))
    async def delete(id: str) -> Response:
        """End it; nothing of it is left when the answer comes."""
        return reply(await verbs.delete(id, s.Nothing()))

    @router.get("/{id}/metrics", **describe(types, returns=Usage))
    async def metrics(id: str) -> Response:
        """What it uses now; null where this host cannot measure it."""
        return reply(await verbs.metrics(id, s.Nothing()))

    return router


def exec_routes(verbs: Verbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/sandboxes/{id}", route_class=Route, tags=["execs"])

    @router.post(
        "/execs", **describe(types, body=s.Start, returns=v.ExecView, raw=EventStream.media_type)
    )
    async def start(
        id: str,
        request: Request,
        key: IdempotencyKey = None,
        stream: Literal["sse"] | None = None,
        wait: bool = True,
    ) -> Response:
        """Run a program (`cmd`) or code (`code`) and wait for its end, or follow it as events."""
        body = _keyed(await read_json(request, s.Start), key)
        if stream or EventStream.media_type in request.headers.get("accept", ""):
            opened = await verbs.open(id, body)
            events = exec_events(opened, encoding=body.encoding, started=True)
            return EventStream(events, held=opened)
        if not wait or body.stdin_open or body.tty:
            return reply(await verbs.start(id, body), 202)
        return reply(await verbs.call(id, body))

    @router.get("/execs", **describe(types, returns=v.ExecsView))
    async def execs(id: str) -> Response:
        """Execs that run, and the last that ended."""
        return reply(await verbs.execs(id, s.Nothing()))

    @router.get("/execs/{exec_id}", **describe(types, returns=v.ExecInfoView))
    async def get_exec(
        id: str, exec_id: str, output: bool = False, encoding: Encoding = "text"
    ) -> Response:
        """One exec; with `output` also what it wrote so far."""
        return reply(await verbs.exec_info(id, exec_id, output=output, encoding=encoding))

    @router.get("/execs/{exec_id}/stream", **describe(types, raw=EventStream.media_type))
    async def follow(
        id: str,
        exec_id: str,
        stdout: Annotated[int, Query(ge=0, lt=2**62)] = 0,
        stderr: Annotated[int, Query(ge=0, lt=2**62)] = 0,
        encoding: Encoding = "text",
        last: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
    ) -> Response:
        """Its output from these offsets on, then its exit, as events; Last-Event-ID goes before
        the offsets.
        """
        if last:
            stdout, stderr, over = parse_event_id(last)
            if over:  # an EventSource that came back after the exit: 204 makes it stop
                return Response(status_code=204)
        opened = await verbs.service.attach(id, exec_id, stdout=stdout, stderr=stderr)
        events = exec_events(opened, encoding=encoding, stdout=stdout, stderr=stderr)
        return EventStream(events, held=opened)

    @router.post("/execs/{exec_id}/kill", **describe(types, body=s.Signal, returns=v.KilledView))
    async def kill(id: str, exec_id: str, request: Request) -> Response:
        """Send a signal to everything the exec started; KILL ends it for certain."""
        p = await read_json(request, s.Signal)
        return reply(
            await verbs.kill(id, s.Kill(exec_id=exec_id, signal=p.signal, grace_ms=p.grace_ms))
        )

    @router.post(
        "/execs/{exec_id}/stdin",
        **describe(types, raw_body="application/octet-stream", returns=v.SentView),
    )
    async def send_input(id: str, exec_id: str, request: Request, eof: bool = False) -> Response:
        """Write the body to the program's input: up to `max_body` (16 MiB) at a time. More goes in
        several requests, or over the WebSocket `…/exec/ws`, which has no limit.
        """
        advise(request, "send it in several requests, or over ws /v1/sandboxes/{id}/exec/ws")
        data = await read_body(request.receive)
        await verbs.service.send_input(id, exec_id, data, eof=eof)
        return reply(v.SentView(bytes=len(data)))

    @router.post("/execs/{exec_id}/resize", **describe(types, body=NewSize, returns=v.DoneView))
    async def resize(id: str, exec_id: str, request: Request) -> Response:
        """Tell the exec's terminal its new size."""
        size = await read_json(request, NewSize)
        return reply(
            await verbs.resize(id, s.Resize(exec_id=exec_id, rows=size.rows, cols=size.cols))
        )

    @router.post("/batch", **describe(types, body=s.Batch, returns=v.BatchView))
    async def batch(id: str, request: Request) -> Response:
        """Run several commands one after the other."""
        return reply(await verbs.batch(id, await read_json(request, s.Batch)))

    return router


def server_routes(verbs: Verbs, types: Described, version: str) -> APIRouter:
    router = APIRouter(route_class=Route, tags=["server"])

    @router.get("/health", **describe(types, returns=HealthView))
    async def health() -> Response:
        """200 while the server takes requests, 503 once it stops."""
        if verbs.gate.closing.is_set():
            return reply(HealthView(status="stopping"), 503)
        return reply(HealthView(status="ok"))

    if verbs.config.metrics != "nobody":

        @router.get(metrics.PATH, **describe(types, raw=metrics.MEDIA_TYPE))
        async def scrape() -> Response:
            """Numbers for Prometheus: sandboxes, execs, the pool, who waits, the process."""
            return await metrics.scrape(verbs.service, verbs.observed)

    @router.get("/v1/pool", **describe(types, returns=PoolStatus))
    async def pool(request: Request) -> Response:
        """What is ready to be used, per template and provider, and who waits."""
        return reply(await verbs.pool(caller_of(request.scope), s.Nothing()))

    @router.get("/v1/capabilities", **describe(types, returns=CapabilitiesView))
    async def capabilities() -> Response:
        """What this host can isolate and limit; for each thing it cannot, the reason and the
        fix.
        """
        found = verbs.service.capabilities()
        providers = {name: ProviderView.of(caps) for name, caps in found.items()}
        return reply(CapabilitiesView(version=version, providers=providers))

    return router


def _keyed(body: Any, key: str | None) -> Any:
    """With the key of the header, if there is one."""
    if not key:
        return body
    if body.idempotency_key not in (None, key):
        problem = f"{brief(body.idempotency_key)}, and {brief(key)} in the header Idempotency-Key"
        raise invalid_field("idempotency_key", problem, hint="send one of them")
    return structs.replace(body, idempotency_key=key)


def _pairs(items: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise InvalidError(f"metadata: expected key=value, got {item[:60]!r}", field="metadata")
        pairs[key] = value
    return pairs
