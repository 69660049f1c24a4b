"""E2B's control plane: the life of sandboxes, in the words, statuses and shapes of its API.

POST   /v2/sandboxes                  create; Idempotency-Key       (POST /sandboxes: older SDKs)
GET    /v2/sandboxes                  list, page by page            (GET /sandboxes: all that run)
POST   /v2/sandboxes/{id}/connect     200, or 201 if it was woken   (POST /sandboxes/{id}/connect)
GET    /sandboxes/{id}
DELETE /sandboxes/{id}
POST   /sandboxes/{id}/timeout        {"timeout": seconds}: it ends that long from now
POST   /sandboxes/{id}/refreshes      {"duration": seconds}: it ends no sooner
POST   /sandboxes/{id}/pause          {"memory": false}: its programs end, its files are kept
POST   /sandboxes/{id}/resume         as older SDKs do
POST   /sandboxes/{id}/fork           {"count": 1 to 20}
PUT    /sandboxes/{id}/network        what it may reach, which here is nothing
GET    /sandboxes/{id}/metrics        ?start=&end=: unix seconds, of the last hour
GET    /sandboxes/metrics             ?sandbox_ids=A,B: the last of each
GET    /v2/sandboxes/{id}/logs        which programs began and ended   (GET /sandboxes/{id}/logs)
POST   /sandboxes/{id}/snapshots      {"name"}: its id is a template's
GET    /snapshots
DELETE /templates/{template_id}       a snapshot, or a template
"""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.body import read_json
from capsule.edge.e2b import control_calls as c
from capsule.edge.e2b import control_shapes as s
from capsule.edge.e2b import control_views as v
from capsule.edge.e2b import pages
from capsule.edge.e2b.described import Describe
from capsule.edge.e2b.sandbox_logs import MOST as LOG_MOST
from capsule.edge.e2b.sandbox_logs import PAGE as LOG_PAGE
from capsule.edge.e2b.sandbox_logs import E2bLogs, E2bOlderLogs, Level, Wanted, older
from capsule.edge.identity import caller_of
from capsule.edge.presence import client
from capsule.edge.routing import Described, Route, reply

IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", max_length=255, pattern="^[a-z0-9-]+$")
]
Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=pages.MOST)]
LogLimit = Annotated[int, Query(ge=1, le=LOG_MOST)]
Token = Annotated[str, Query(alias="nextToken", max_length=200)]
Moment = Annotated[int | None, Query(ge=0, lt=2**53)]


def control_routes(control: c.Control, types: Described) -> APIRouter:
    router = APIRouter(route_class=Route, tags=["e2b"])
    described = Describe(types)
    for part in (_many, _life, _looks, _snapshots):
        part(router, control, described)
    return router


def _many(router: APIRouter, control: c.Control, described: Describe) -> None:
    @router.post("/v2/sandboxes", **described(s.E2bCreate, v.E2bSandbox, 201))
    async def create(request: Request, key: IdempotencyKey = None) -> Response:
        """Create a sandbox; it runs when the answer comes."""
        return await _create(request, key)

    @router.post("/sandboxes", **described(s.E2bCreate, v.E2bSandbox, 201))
    async def create_older(request: Request, key: IdempotencyKey = None) -> Response:
        """Create a sandbox, as older SDKs do."""
        return await _create(request, key, older=True)

    async def _create(request: Request, key: str | None, *, older: bool = False) -> Response:
        body = await read_json(request, s.E2bCreate)
        caller = caller_of(request.scope)
        client.set(request.receive)
        return reply(await control.create(caller, body, _host(request), key=key, older=older), 201)

    @router.get("/v2/sandboxes", **described(returns=v.E2bListed, many=True))
    async def list_sandboxes(
        request: Request,
        metadata: str = "",
        state: Annotated[list[str] | None, Query()] = None,
        order: Order = "desc",
        started: Annotated[datetime | None, Query(alias="startedAfter")] = None,
        template: str = "",
        limit: Limit = pages.PAGE,
        token: Token = "",
    ) -> Response:
        """List sandboxes that run or are paused; the header `x-next-token` says that there are
        more.
        """
        query = c.Query(
            metadata=metadata,
            states=c.states(state or []),
            started_after=None if started is None else c.aware(started),
            template=template,
            newest_first=order == "desc",
            limit=limit,
            next_token=token,
        )
        return _paged(*control.list(caller_of(request.scope), query))

    @router.get("/sandboxes", **described(returns=v.E2bListed, many=True))
    async def list_running(request: Request, metadata: str = "") -> Response:
        """List the sandboxes that run."""
        query = c.Query(metadata=metadata, states=frozenset({"running"}), limit=sys.maxsize)
        return reply(control.list(caller_of(request.scope), query).items)

    @router.post("/v2/sandboxes/{id}/connect", **described(s.E2bConnect, v.E2bSandbox, also=201))
    async def connect(id: str, request: Request) -> Response:
        """Use a sandbox, which is woken if it is paused: then the status is 201."""
        return await _connect(id, request)

    @router.post("/sandboxes/{id}/connect", **described(s.E2bConnect, v.E2bSandbox, also=201))
    async def connect_older(id: str, request: Request) -> Response:
        """Use a sandbox, as older SDKs do."""
        return await _connect(id, request)

    async def _connect(id: str, request: Request) -> Response:
        body = await read_json(request, s.E2bConnect)
        found, woken = await control.connect(id, body, _host(request))
        return reply(found, 201 if woken else 200)

    # Here, because /sandboxes/{id} would take it for an id.
    @router.get("/sandboxes/metrics", **described(returns=v.E2bManyMetrics))
    async def last_metrics(
        request: Request, ids: Annotated[str, Query(alias="sandbox_ids", max_length=4096)] = ""
    ) -> Response:
        """What sandboxes use now; of those that there are."""
        wanted = [id for id in ids.split(",") if id][: pages.PAGE]
        return reply(await control.last_metrics(caller_of(request.scope), wanted))


def _life(router: APIRouter, control: c.Control, described: Describe) -> None:
    @router.get("/sandboxes/{id}", **described(returns=v.E2bDetail))
    async def get(id: str, request: Request) -> Response:
        """A sandbox as it is now."""
        return reply(control.detail(id, _host(request)))

    @router.delete("/sandboxes/{id}", **described(status=204))
    async def kill(id: str) -> Response:
        """End it; nothing of it is left when the answer comes."""
        await control.kill(id)
        return _done()

    @router.post("/sandboxes/{id}/timeout", **described(s.E2bTimeout, status=204))
    async def set_timeout(id: str, request: Request) -> Response:
        """Let it end so many seconds from now; 0 is at once."""
        await control.set_timeout(id, (await read_json(request, s.E2bTimeout)).timeout)
        return _done()

    @router.post("/sandboxes/{id}/refreshes", **described(s.E2bRefresh, status=204))
    async def refresh(id: str, request: Request) -> Response:
        """Let it end no sooner than so many seconds from now."""
        await control.refresh(id, (await read_json(request, s.E2bRefresh)).duration)
        return _done()

    @router.post("/sandboxes/{id}/pause", **described(s.E2bPause, status=204))
    async def pause(id: str, request: Request) -> Response:
        """Let everything in it stand still; with `"memory": false` its programs end, and its files
        are kept. 409: it is paused already.
        """
        await control.pause(id, memory=(await read_json(request, s.E2bPause)).memory)
        return _done()

    @router.post("/sandboxes/{id}/resume", **described(s.E2bResume, v.E2bSandbox, 201))
    async def resume(id: str, request: Request) -> Response:
        """Let it go on, as older SDKs do."""
        body = await read_json(request, s.E2bResume)
        return reply(await control.resume(id, body, _host(request)), 201)

    @router.post("/sandboxes/{id}/fork", **described(s.E2bFork, v.E2bForked, status=201, many=True))
    async def fork(id: str, request: Request) -> Response:
        """Make further sandboxes with its files."""
        body = await read_json(request, s.E2bFork)
        return reply(await control.fork(id, body, _host(request)), 201)

    @router.put("/sandboxes/{id}/network", **described(s.E2bNetworkUpdate, status=204))
    async def set_network(id: str, request: Request) -> Response:
        """Say what it may reach. Sandboxes have no network: what only denies is kept and shown,
        what asks for more is refused.
        """
        await control.set_network(id, await read_json(request, s.E2bNetworkUpdate))
        return _done()


def _looks(router: APIRouter, control: c.Control, described: Describe) -> None:
    @router.get("/sandboxes/{id}/metrics", **described(returns=v.E2bMetric, many=True))
    async def metrics(id: str, start: Moment = None, end: Moment = None) -> Response:
        """What it has used in the last hour, and uses now."""
        return reply(await control.metrics(id, start, end))

    @router.get("/sandboxes/{id}/logs", **described(returns=E2bOlderLogs))
    async def logs(id: str, start: Moment = None, limit: LogLimit = LOG_PAGE) -> Response:
        """Which programs began and ended in it."""
        return reply(older(await control.logs(id, Wanted(start or 0, limit))))

    @router.get("/v2/sandboxes/{id}/logs", **described(returns=E2bLogs))
    async def logs_v2(
        id: str,
        cursor: Moment = None,
        limit: LogLimit = LOG_PAGE,
        direction: Literal["forward", "backward"] = "forward",
        level: Level = "debug",
        search: Annotated[str, Query(max_length=256)] = "",
    ) -> Response:
        """Which programs began and ended in it, from a moment on or back from it."""
        wanted = Wanted(cursor or 0, limit, direction == "backward", level, search)
        return reply(E2bLogs(logs=await control.logs(id, wanted)))


def _snapshots(router: APIRouter, control: c.Control, described: Describe) -> None:
    @router.post(
        "/sandboxes/{id}/snapshots", **described(s.E2bSnapshot, v.E2bSnapshotInfo, status=201)
    )
    async def snapshot(id: str, request: Request) -> Response:
        """Keep its files under a name, from which others start."""
        return reply(await control.snapshot(id, await read_json(request, s.E2bSnapshot)), 201)

    @router.get("/snapshots", **described(returns=v.E2bSnapshotInfo, many=True))
    async def snapshots(
        request: Request,
        sandbox: Annotated[str, Query(alias="sandboxID", max_length=64)] = "",
        name: Annotated[str, Query(max_length=128)] = "",
        limit: Limit = pages.PAGE,
        token: Token = "",
    ) -> Response:
        """List snapshots, newest first."""
        found = control.snapshots(
            caller_of(request.scope), sandbox=sandbox, name=name, limit=limit, token=token
        )
        return _paged(*found)

    @router.delete("/templates/{template_id}", **described(status=204))
    async def delete_template(template_id: str, request: Request) -> Response:
        """Delete a snapshot, or a template."""
        await control.delete_template(caller_of(request.scope), template_id)
        return _done()


def _host(request: Request) -> str:
    return request.headers.get("host", "localhost")


def _done() -> Response:
    return Response(status_code=204)


def _paged(items: Any, next_token: str | None) -> Response:
    answer = reply(items)
    if next_token is not None:
        answer.headers["x-next-token"] = next_token
    return answer
