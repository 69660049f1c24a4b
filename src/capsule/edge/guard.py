"""Who may talk to us at all: one layer for HTTP and WebSockets alike, before any route sees the
request.

1. Host: a name that is ours. A page that rebinds its own name to our address still sends its own
   name.
2. Origin: none (curl, SDKs), our own, or one the operator allowed. Browsers send it with every
   WebSocket and every request that changes something, so a web page in the user's browser cannot
   drive the server. A sandbox that has a name of its own (`edge.e2b.doors`) has origins of its own:
   who may ask there is its program's to say, and its pages are strangers here like any other. What
   takes a sandbox's own token, or a signed link, is for pages of any origin.
3. Key: see `identity`.
4. Body: a Meter (see `body`) in front of it.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence
from functools import lru_cache

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from capsule.config import Config, is_loopback
from capsule.edge.addresses import Addresses
from capsule.edge.body import Meter, finishing
from capsule.edge.e2b.doors import DOOR, domains_of, door_in, door_of, for_pages, near_door
from capsule.edge.errors import send_error
from capsule.edge.identity import ADDRESS, CALLER, NOBODY, Identity
from capsule.edge.rates import CHARGE, Rates, Told, TooOftenError
from capsule.errors import CapsuleError, ForbiddenError, InvalidError
from capsule.model import MIB
from capsule.service.caller import Caller
from capsule.service.room import Room

# What a browser or a load balancer must reach without a key: nothing here tells of any sandbox.
PUBLIC = frozenset({"/", "/health", "/docs", "/openapi.json", "/favicon.ico"})
TOLD = "capsule.told"  # in a scope: whoever says in the answer what is left
BODIES = 32 * MIB  # of memory for large request bodies, all together; further ones wait
_MAX_HOST = 260  # the longest name, and a port

Headers = Sequence[tuple[bytes, bytes]]


class SiteGuard:
    """Host and Origin, and the meter. Every refusal of the layers inside it is answered here."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._max_body = config.max_body
        self._room = Room(
            BODIES, "large request", hint="try again in a moment, or send less at once"
        )
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        self._domains = domains_of(config)
        self._host_ok = lru_cache(maxsize=1024)(HostRule(config))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (length := _body_length(scope["headers"])) != 0:
            receive = meter = Meter(receive, length=length, limit=self._max_body, room=self._room)
            send = finishing(meter, send)
            scope["capsule.meter"] = meter
        try:
            host = self._check_host(scope["headers"])
            door = scope[DOOR] = door_of(scope, self._domains)
            if not ((door is not None and door.by_name) or for_pages(scope)):
                self._check_origin(scope, host)
        except CapsuleError as error:
            await send_error(scope, receive, send, error)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> str:
        found = [value for name, value in headers if name == b"host"]
        if len(found) != 1:
            raise InvalidError(f"host: {len(found)} headers, must be one", field="host")
        host = found[0].decode("latin-1").lower()
        if len(host) > _MAX_HOST or not self._host_ok(host):
            raise ForbiddenError(
                f"host not allowed: {host[:100]!r}",
                hint="use localhost, or add the name to CAPSULE_ALLOWED_HOSTS",
            )
        return host

    def _check_origin(self, scope: Scope, host: str) -> None:
        headers = dict(scope["headers"])
        raw = headers.get(b"origin")
        if raw is None:
            _check_fetch_site(scope, headers)
            return
        origin = raw.decode("latin-1").lower()
        if not _same_site(origin, host) and not self._origins & {origin, "*"}:
            raise ForbiddenError(
                f"origin not allowed: {origin[:100]!r}",
                hint="add it to CAPSULE_ALLOWED_ORIGINS if you trust this site with your sandboxes",
            )


class HostRule:
    """Loopback's names, what the operator named, and any address if we listen beyond loopback.

    An address cannot be rebound, and the server does not know all addresses it is reached by.
    """

    def __init__(self, config: Config) -> None:
        self._names = {name.lower() for name in (*config.allowed_hosts, config.host)}
        self._domains = domains_of(config)
        self._any_address = not is_loopback(config.host)
        self._domain = _without_port((config.sandbox_domain or "").lower())

    def __call__(self, host: str) -> bool:
        name = _without_port(host)
        if name in self._names or host in self._names or door_in(name, self._domains):
            return True
        if near_door(name):
            return False
        if "*" in self._names:
            return True
        if name == "localhost" or name.endswith(".localhost"):
            return True
        if self._domain and (name == self._domain or name.endswith(f".{self._domain}")):
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or self._any_address


class AddressGuard:
    """Where a request comes from goes into the scope, and counts: also what is for a sandbox, and
    needs no key. It is counted before the key is looked at: who guesses keys is held up too.
    """

    def __init__(self, app: ASGIApp, config: Config, rates: Rates) -> None:
        self._app = app
        self._addresses = Addresses(config.trusted_proxies)
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ADDRESS] = self._addresses.of(scope)
        if self._addresses.over_tls(scope):
            scope["scheme"] = "wss" if scope["type"] == "websocket" else "https"
        if self._rates and not _is_health(scope):
            send = scope[TOLD] = told = Told(send)
            try:
                told.note(self._rates.take_address(scope[ADDRESS]))
            except TooOftenError as error:
                told.note(error.window)
                await send_error(scope, receive, send, error)
                return
        await self._app(scope, receive, send)


def _is_health(scope: Scope) -> bool:
    """Our own: those of sandboxes are behind doors."""
    return scope["path"] == "/health" and scope.get(DOOR) is None


class KeyGuard:
    """Who asks goes into the scope, for whoever answers: see `identity.caller_of`."""

    def __init__(
        self,
        app: ASGIApp,
        identity: Identity,
        rates: Rates,
        *,
        public: frozenset[str] = PUBLIC,
    ) -> None:
        self._app = app
        self._identity = identity
        self._public = public
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told: Told | None = scope.get(TOLD)
        try:
            await self._admit(scope, told)
        except CapsuleError as error:
            if told is not None and isinstance(error, TooOftenError):
                told.note(error.window)
            await send_error(scope, receive, send, error)
            return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, told: Told | None) -> None:
        if scope["path"] in self._public:
            scope[CALLER] = NOBODY
            return
        caller = scope[CALLER] = await self._identity.caller(scope)
        structlog.contextvars.bind_contextvars(tenant=caller.tenant, key=caller.key_id)
        if told is not None:
            told.note(self._rates.take_key(caller))
            scope[CHARGE] = functools.partial(self._charge, caller, scope[ADDRESS])

    def _charge(self, caller: Caller, address: str, count: int) -> None:
        if count > 0:
            self._rates.take_address(address, count)
            self._rates.take_key(caller, count)


def _check_fetch_site(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """No Origin: not a browser, or a browser that loads something (a link, an image). A link may be
    followed.
    """
    site = headers.get(b"sec-fetch-site", b"none")
    if site in (b"none", b"same-origin"):
        return
    if scope.get("method") in ("GET", "HEAD") and headers.get(b"sec-fetch-mode") == b"navigate":
        return
    raise ForbiddenError(
        "request from another site refused", hint="open the page itself, or use an SDK"
    )


def _same_site(origin: str, host: str) -> bool:
    scheme, _, netloc = origin.partition("://")
    if scheme not in ("http", "https") or not netloc:
        return False
    default = ":80" if scheme == "http" else ":443"
    return netloc.removesuffix(default) == host.removesuffix(default)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _body_length(headers: Headers) -> int | None:
    """None: not known beforehand (chunked)."""
    length: int | None = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = int(value) if value.isdigit() else None
    return length
