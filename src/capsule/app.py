"""Putting it together: configuration → providers → service → the ASGI app → a server that
listens.

serve ── open_service ── service (its own tasks; it opens and closes webhooks and trail)
      ├─ sessions over it (their own tasks)
      └─ Server.serve ── uvicorn's connections, the drain
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import structlog
import uvloop
from starlette.types import ASGIApp

from capsule import tracing
from capsule.audit.trail import Trail
from capsule.catalog import load_catalog
from capsule.config import Config, check_exposure, is_loopback
from capsule.edge.drain import Gate
from capsule.edge.logs import configure_logging
from capsule.edge.observed import log_happening
from capsule.edge.server import Server
from capsule.edge.site import build_site
from capsule.errors import ConflictError, ForbiddenError, InvalidError
from capsule.model import Isolation
from capsule.providers.contract import Provider
from capsule.providers.ondemand import OnDemand
from capsule.providers.registry import make_provider, names
from capsule.service import Service
from capsule.service.accounts import AccountFile
from capsule.service.happenings import Happenings
from capsule.sessions.sessions import Sessions
from capsule.webhooks.hooks import Webhooks

log = structlog.get_logger(__name__)

Announce = Callable[[Config, Service, int], str]  # what a server that listens on a port says


def version() -> str:
    try:
        return installed_version("capsule-sandbox")
    except PackageNotFoundError:
        return "0+source"


def build_app(
    config: Config,
    service: Service,
    gate: Gate | None = None,
    sessions: Sessions | None = None,
    webhooks: Webhooks | None = None,
    trail: Trail | None = None,
) -> ASGIApp:
    """Every surface over an open service. `gate` is what a graceful stop works with; without
    open `sessions` and `webhooks` those who ask for one are refused, and without an open `trail`
    nothing is written down."""
    return build_site(
        config,
        service,
        gate=gate or Gate(),
        version=version(),
        sessions=sessions or Sessions(config, service),
        webhooks=webhooks or Webhooks(config, Happenings()),
        trail=trail or Trail(config, Happenings()),
    )


@contextlib.asynccontextmanager
async def open_service(
    config: Config,
    happenings: Happenings | None = None,
    listeners: Sequence[contextlib.AbstractAsyncContextManager[object]] = (),
) -> AsyncIterator[Service]:
    """The service with all providers, of which only the configured one is opened at once, and all
    templates; also for use without a server."""
    catalog = await asyncio.to_thread(load_catalog, config.templates_dir, data_dir=config.data_dir)
    own = await asyncio.to_thread(make_provider, config.provider, config, catalog)
    providers: dict[str, Provider] = {config.provider: own}
    for name in await asyncio.to_thread(names):
        if name != config.provider:
            providers[name] = OnDemand(
                name,
                functools.partial(make_provider, name, config, catalog),
                least=config.min_isolation,
                mark=config.data_dir / "providers" / name,
            )
    service = Service(config, providers, catalog, happenings=happenings, listeners=listeners)
    if config.log_requests == "yes":
        service.happenings.listeners.append(log_happening)
    async with service:
        yield service


def serve(config: Config, announce: Announce | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. Prints what `announce` says.

    Raises ForbiddenError (not on loopback, and no keys), ConflictError (the port is taken), and
    what opening the service raises.
    """
    check_exposure(config, stored=bool(AccountFile(config.data_dir).keys()))
    configure_logging(config)
    allow_open_files()
    with contextlib.ExitStack() as stack:
        if config.otel_endpoint is not None:
            stack.callback(tracing.start(config.otel_endpoint, version()))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(_serve(config, announce or banner))


async def _serve(config: Config, announce: Announce) -> None:
    # Bound first: a port that is taken must not cost the start of everything else.
    with bind(config) as listener:
        happenings = Happenings()
        webhooks, trail = Webhooks(config, happenings), Trail(config, happenings)
        listeners = (webhooks,) if config.audit == "no" else (webhooks, trail)
        async with (
            open_service(config, happenings, listeners) as service,
            Sessions(config, service) as sessions,
        ):
            for each in service.capabilities()[config.provider].warnings:
                log.warning(each)
            gate = Gate()
            app = build_app(config, service, gate, sessions, webhooks, trail)
            text = announce(config, service, listener.getsockname()[1])
            ready = functools.partial(_say, text)
            server = Server(config, app, gate, on_drain=service.drain, on_ready=ready)
            await server.serve(sockets=[listener])


def allow_open_files() -> None:
    """As many as we may have: each request that waits has a connection, and its exec another."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # more than this kernel's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def bind(config: Config) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host.strip("[]"), config.port))
    except socket.gaierror as error:
        listener.close()
        raise InvalidError(f"host: no such address: {config.host!r}", field="host") from error
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        if isinstance(error, PermissionError):
            raise ForbiddenError(f"not allowed to listen on {where}", hint="--port 8080") from error
        raise ConflictError(
            f"cannot listen on {where}: {error.strerror}",
            hint=f"stop what listens there, or choose another port: --port {config.port + 1}",
        ) from error
    return listener


def server_url(config: Config, port: int) -> str:
    host = config.host.strip("[]")
    if is_loopback(host) or host in ("", "0.0.0.0", "::"):
        return f"http://localhost:{port}"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_BEST = f"level {Isolation.NAMESPACES}"


def banner(config: Config, service: Service, port: int) -> str:
    """What a person sees first: where it listens, how strong the walls are, and what to paste."""
    url = server_url(config, port)
    found = service.capabilities()[config.provider]
    asked = config.api_keys or service.keys.any
    key = ' -H "Authorization: Bearer $CAPSULE_API_KEY"' if asked else ""
    weaker = f", {len(found.unenforced)} limits not enforced" if found.unenforced else ""
    better = next((each.fix for each in found.findings if each.name == _BEST and each.fix), "")
    stronger = f"\n  for namespaces: {better}" if better else ""
    box = f"{url}/v1/sandboxes"
    json = "-H 'Content-Type: application/json' -d '{\"code\": \"print(6 * 7)\"}'"
    return f"""
  Capsule {version()} on {url}   (docs: {url}/docs)
  isolation: {found.isolation}{weaker}   (details: capsule doctor){stronger}

  Try it, in another shell:

    id=$(curl -s{key} -X POST {box} | cut -d'"' -f4)
    curl -s{key} {box}/$id/execs {json}
    curl -s{key} -X DELETE {box}/$id

"""
