"""All surfaces as one ASGI app: `/rpc` straight to its function, everything else through FastAPI's
router, the guards around both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from capsule.audit.trail import Trail
from capsule.config import Config
from capsule.edge import docs_page, metrics
from capsule.edge.drain import Gate
from capsule.edge.e2b.about import About
from capsule.edge.e2b.access import Access
from capsule.edge.e2b.control import control_routes
from capsule.edge.e2b.control_views import https_ports
from capsule.edge.e2b.doors import DOOR, ENVD, INTERPRETER, Doors, Room, for_pages
from capsule.edge.e2b.envd import Envd
from capsule.edge.e2b.file_content import FileContent
from capsule.edge.e2b.filesystem import Filesystem
from capsule.edge.e2b.interpreter import Interpreter
from capsule.edge.e2b.process import Processes
from capsule.edge.e2b.rpc import Call
from capsule.edge.e2b.secrets import secret_routes
from capsule.edge.e2b.templates import e2b_template_routes
from capsule.edge.e2b.uploads import PREFIX as UPLOADS
from capsule.edge.e2b.volume_content import PREFIX as VOLUME_CONTENT
from capsule.edge.e2b.volume_content import VolumeContent
from capsule.edge.e2b.volumes import volume_routes as e2b_volume_routes
from capsule.edge.e2b.watchers import Watchers
from capsule.edge.errors import Answer, send_error, understand
from capsule.edge.exec_socket import ExecSocketEndpoint
from capsule.edge.files import FileVerbs
from capsule.edge.guard import PUBLIC, AddressGuard, KeyGuard, SiteGuard
from capsule.edge.identity import Identity
from capsule.edge.index import Index
from capsule.edge.methods import build_methods
from capsule.edge.nowhere import METHODS, answer_the_lost
from capsule.edge.pieces import in_pieces
from capsule.edge.ports.room import Ports
from capsule.edge.rates import Rates
from capsule.edge.rest import exec_routes, sandbox_routes, server_routes
from capsule.edge.rest_agents import agent_routes
from capsule.edge.rest_contexts import context_routes
from capsule.edge.rest_files import file_routes
from capsule.edge.rest_keys import key_routes
from capsule.edge.rest_playground import playground_routes
from capsule.edge.rest_registry import registry_routes
from capsule.edge.rest_sessions import session_routes
from capsule.edge.rest_snapshots import snapshot_routes
from capsule.edge.rest_templates import template_routes
from capsule.edge.rest_tenants import tenant_routes
from capsule.edge.rest_trail import trail_routes
from capsule.edge.rest_volumes import volume_routes
from capsule.edge.rest_webhooks import webhook_routes
from capsule.edge.routing import Described, add_schemas, reply
from capsule.edge.rpc import Rpc
from capsule.edge.scopes import protect
from capsule.edge.session_verbs import SessionVerbs
from capsule.edge.terminal import TerminalEndpoint
from capsule.edge.verbs import Verbs
from capsule.service import Service
from capsule.sessions.sessions import Sessions
from capsule.webhooks.hooks import Webhooks

RATE_HEADERS = ["RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"]
DESCRIPTION = "Run untrusted code in sandboxes."
GUIDE = """\
curl -X POST localhost:8080/v1/sandboxes
curl localhost:8080/v1/sandboxes/ID/execs -H 'Content-Type: application/json' \\
     -d '{"code": "print(6 * 7)"}'
curl -X DELETE localhost:8080/v1/sandboxes/ID

JSON-RPC 2.0   POST /rpc, methods sandbox.v1.*
terminal       ws://localhost:8080/terminal/ID
exec + input   ws://localhost:8080/v1/sandboxes/ID/exec/ws"""


def build_site(
    config: Config,
    service: Service,
    *,
    gate: Gate,
    version: str,
    sessions: Sessions,
    webhooks: Webhooks,
    trail: Trail,
) -> ASGIApp:
    access = Access.open(config.data_dir)
    verbs = Verbs(config, service, gate, webhooks, trail, access)
    files = FileVerbs(config, service)
    rpc = Rpc(build_methods(verbs, files), called=verbs.observed.called)
    web = build_web(verbs, files, version, sessions=SessionVerbs(sessions, gate))

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/rpc" and scope["type"] == "http":
            await rpc(scope, receive, send)
        else:
            await web(scope, receive, send)

    public = PUBLIC | {metrics.PATH} if config.metrics == "anyone" else PUBLIC
    protect(web, service.own, public)
    web.router.routes.insert(0, Index(web.router.routes))
    identity, rates = Identity(config, service.keys), Rates(config)
    site: ASGIApp = KeyGuard(answering(route), identity, rates, public=public)
    content = VolumeContent(service, config, gate, access)
    site = beside(site, {VOLUME_CONTENT: content, UPLOADS: verbs.uploads})
    ports = Ports(service, identity, config, gate, access, https_ports)
    rooms = rooms_of(service, config, gate, access, identity, ports)
    site = AddressGuard(Doors(site, rooms, ports), config, rates)
    if config.allowed_origins:
        site = with_cors(site, config)
    return gate.wrap(verbs.observed.wrap(in_pieces(SiteGuard(site, config))))


def rooms_of(
    service: Service, config: Config, gate: Gate, access: Access, identity: Identity, ports: Ports
) -> dict[int, Room]:
    """What answers at ports of sandboxes where programs could."""
    return {
        ENVD: Envd(service, access, identity, ports, gate, envd_calls(service, config, gate)),
        INTERPRETER: Interpreter(service, access, identity, ports, gate, config),
    }


def envd_calls(service: Service, config: Config, gate: Gate) -> dict[tuple[str, str], Call]:
    return {
        **About(service).calls(),
        **Processes(service).calls(),
        **Filesystem(service).calls(),
        **Watchers(service, gate.closing).calls(),
        **FileContent(service, config).calls(),
    }


def build_web(verbs: Verbs, files: FileVerbs, version: str, *, sessions: SessionVerbs) -> FastAPI:
    types: Described = set()
    web = FastAPI(
        title="Capsule",
        version=version,
        description=DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # see `capsule.tracing`
    )
    for router in (
        sandbox_routes(verbs, types),
        exec_routes(verbs, types),
        context_routes(verbs.contexts, types),
        file_routes(verbs, files, types),
        template_routes(verbs.templates, types),
        snapshot_routes(verbs.snapshots, types),
        volume_routes(verbs.volumes, types),
        key_routes(verbs.keys, types),
        tenant_routes(verbs.tenants, types),
        webhook_routes(verbs.webhooks, types),
        trail_routes(verbs.trail, types),
        agent_routes(verbs.agents, types),
        playground_routes(verbs.playground, types),
        session_routes(sessions, types),
        registry_routes(sessions, types),
        e2b_template_routes(verbs.e2b_templates, types),  # before /templates/{template_id}
        control_routes(verbs.e2b, types),
        e2b_volume_routes(verbs.e2b_volumes, types),
        secret_routes(verbs.vault, types),
        server_routes(verbs, types, version),
    ):
        web.router.routes.extend(router.routes)  # one flat list, which `protect` goes over
    terminal, exec_socket = TerminalEndpoint(verbs), ExecSocketEndpoint(verbs)
    for path, endpoint in (
        ("/terminal/{id}", terminal),
        ("/sandbox/{id}/stream", terminal),
        ("/v1/sandboxes/{id}/exec/ws", exec_socket),
    ):
        web.router.routes.append(WebSocketRoute(path, endpoint))
    answer_the_lost(web)
    _add_documents(web, types)
    return web


def _add_documents(web: FastAPI, types: Described) -> None:
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(
                get_openapi(
                    title=web.title,
                    version=web.version,
                    description=web.description,
                    routes=web.routes,
                )
            )
            add_schemas(made, types)
        return made

    async def openapi(request: Request) -> Response:
        return reply(document())

    async def docs(request: Request) -> Response:
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(docs_page.render(document(), GUIDE), headers=policy)

    async def root(request: Request) -> Response:
        return RedirectResponse("/docs")

    web.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to replace it
    web.add_route("/openapi.json", openapi, include_in_schema=False)
    web.add_route("/docs", docs, include_in_schema=False)
    web.add_route("/", root, include_in_schema=False)


def beside(site: ASGIApp, apps: Mapping[str, ASGIApp]) -> ASGIApp:
    """By the first part of the path: apps that ask for something else than a key."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        first = "/".join(scope["path"].split("/", 2)[:2]) + "/"
        await apps.get(first, site)(scope, receive, send)

    return run


def answering(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> ASGIApp:
    """The last resort: whatever was raised before an answer began becomes one."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send)
        try:
            await app(scope, receive, answer)
        except Exception as error:
            known = understand(error)
            if not answer.begun:
                await send_error(scope, receive, send, known)

    return run


def with_cors(app: ASGIApp, config: Config) -> ASGIApp:
    """Browsers of allowed origins need to be told that they may; SiteGuard has refused all
    others. At a sandbox's own name that is for its program to say, and what takes a sandbox's token
    is for all (see `edge.e2b.doors`).
    """
    cors = CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=["Content-Range", "ETag", "Retry-After", *RATE_HEADERS],
        max_age=600,
    )

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        door = scope[DOOR]
        told_there = (door is not None and door.by_name) or for_pages(scope)
        await (app if told_there else cors)(scope, receive, send)

    return run
