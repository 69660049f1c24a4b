"""Which sandbox, and which of its ports, a request is for.

Browsers and others say it with the host's name, `PORT-ID.domain`; E2B's SDKs with two headers,
which count where the name says nothing: a page from a sandbox, whose name says it, reaches no other
by writing headers. A signed link to a file has neither, and is known by its signature alone. What
is for no sandbox is for the site. Decided for each request: one connection carries all kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from capsule.config import Config
from capsule.errors import InvalidError

DOOR = "capsule.door"  # in the scope
ENVD = 49983
INTERPRETER = 49999

METHODS = ["HEAD", "GET", "POST", "PUT", "PATCH", "DELETE"]
EXPOSED = ["Content-Range", "ETag", "Location", "Cache-Control", "X-Content-Type-Options"]

_ID = b"e2b-sandbox-id"
_PORT = b"e2b-sandbox-port"
_HOST = re.compile(rb"(0|[1-9][0-9]{0,4})-([a-z0-9]{1,64})\.", re.IGNORECASE)
_NEAR = re.compile(r"[0-9]-[a-z2-7]{16}(?![a-z0-9])", re.IGNORECASE)
_DIGITS = re.compile(rb"[0-9]{1,5}")
_PLAIN = re.compile(rb"[A-Za-z0-9_-]{1,64}")  # what may be an id


class Door(NamedTuple):
    id: str
    port: int
    by_name: bool = False  # the host's name said it


class Room(Protocol):
    """What is behind a door."""

    async def enter(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None: ...


class Doors:
    """`rooms` by port; `ports` is behind all others."""

    def __init__(self, site: ASGIApp, rooms: Mapping[int, Room], ports: Room) -> None:
        self._site = site
        self._rooms = rooms
        self._ports = ports
        self._to_pages = CORSMiddleware(
            self._go,
            allow_origins=["*"],
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=EXPOSED,
            max_age=7200,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("//"):  # a URL that somebody has ended with a slash
            scope["path"] = "/" + scope["path"].lstrip("/")
        await (self._to_pages if for_pages(scope) else self._go)(scope, receive, send)

    async def _go(self, scope: Scope, receive: Receive, send: Send) -> None:
        door: Door | None = scope[DOOR] or signed(scope)
        if door is None:
            await self._site(scope, receive, send)
            return
        room = self._rooms.get(door.port, self._ports)
        scope["route"] = BEHIND.get(door.port, PORT)
        await room.enter(door, scope, receive, send)


def signed(scope: Scope) -> Door | None:
    """A link to a file, which says what is to be read or written but not where: see `envd`."""
    path = scope["path"]
    if path.lstrip("/") == "files" and b"signature=" in scope.get("query_string", b""):
        return Door("", ENVD)
    return None


def for_pages(scope: Scope) -> bool:
    """Whether web pages of any site may ask, as they may at E2B: there it takes the sandbox's token
    or a signature, which no browser adds by itself. Before it sends our headers a browser asks for
    their names, and then nobody knows yet for which sandbox.
    """
    if scope["type"] != "http":
        return False
    door: Door | None = scope[DOOR] or signed(scope)
    if door is not None:
        return door.port in BEHIND
    return scope["method"] == "OPTIONS" and any(
        name == b"access-control-request-headers" and _ID in value.lower()
        for name, value in scope["headers"]
    )


class Place(NamedTuple):
    """What is counted instead of a route: paths behind a door are not ours."""

    path: str


PORT = Place("port")
BEHIND = {ENVD: Place("envd"), INTERPRETER: Place("interpreter")}


def domains_of(config: Config) -> frozenset[str] | None:
    """Below which sandboxes have names: the one that is configured, or those that the server has;
    and localhost. None: below any."""
    if "*" in config.allowed_hosts:
        return None
    named = [config.sandbox_domain] if config.sandbox_domain else config.allowed_hosts
    return frozenset({"localhost", *(name.partition(":")[0].lower() for name in named)})


def door_in(host: str, domains: frozenset[str] | None) -> bool:
    """Whether this is the name of a sandbox's port."""
    scope = {"headers": [(b"host", host.encode("latin-1"))]}
    return door_of(scope, domains) is not None


def near_door(host: str) -> bool:
    """Whether a sandbox and a port stand somewhere in the name. Where that is no door, it is not
    the server's name either: whoever uses it means a program.
    """
    return _NEAR.search(host) is not None


def door_of(scope: Scope, domains: frozenset[str] | None = None) -> Door | None:
    """None: the request is for the server itself. Below `domains` sandboxes have names; None: below
    any. Raises InvalidError.
    """
    id = port = host = b""
    for name, value in scope["headers"]:
        if name == _ID:
            id = value
        elif name == _PORT:
            port = value
        elif name == b"host":
            host = value
    if (found := _HOST.match(host)) is not None:
        below = host[found.end() :].partition(b":")[0].decode("latin-1").lower()
        if domains is None or below in domains:
            return Door(found[2].decode().lower(), int(found[1]), by_name=True)
    if not (port and _PLAIN.fullmatch(id)):
        return None
    if not _DIGITS.fullmatch(port):
        told = port[:40].decode("latin-1")
        raise InvalidError(
            f"E2b-Sandbox-Port: {told!r} is no port, allowed: 1 to 65535", field="E2b-Sandbox-Port"
        )
    return Door(id.decode("latin-1"), int(port))
