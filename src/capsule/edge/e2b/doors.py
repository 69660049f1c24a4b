"""Which sandbox, and which of its ports, a request is for.

E2B's SDKs say it with two headers; browsers and others with the host's name, `PORT-ID.domain`. A
signed link to a file has neither, and is known by its signature alone. What is for no sandbox is
for the site. Decided for each request: one connection carries all kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

ENVD = 49983
INTERPRETER = 49999

_ID = b"e2b-sandbox-id"
_PORT = b"e2b-sandbox-port"
_HOST = re.compile(rb"([0-9]{1,5})-([a-z0-9]{1,64})\.", re.IGNORECASE)


class Door(NamedTuple):
    id: str
    port: int
    by_name: bool = False  # the host's name said it


class Room(Protocol):
    """What is behind a door."""

    async def enter(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None: ...


class Doors:
    def __init__(self, site: ASGIApp, rooms: Mapping[int, Room]) -> None:
        self._site = site
        self._rooms = rooms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("//"):  # a URL that somebody has ended with a slash
            scope["path"] = "/" + scope["path"].lstrip("/")
        door = door_of(scope) or signed(scope)
        room = None if door is None else self._rooms.get(door.port)
        if door is None or room is None:
            await self._site(scope, receive, send)
        else:
            await room.enter(door, scope, receive, send)


def signed(scope: Scope) -> Door | None:
    """A link to a file, which says what is to be read or written but not where: see `envd`."""
    path = scope["path"]
    if path.lstrip("/") == "files" and b"signature=" in scope.get("query_string", b""):
        return Door("", ENVD)
    return None


def door_of(scope: Scope) -> Door | None:
    """None: the request is for the server itself."""
    id = port = host = b""
    for name, value in scope["headers"]:
        if name == _ID:
            id = value
        elif name == _PORT:
            port = value
        elif name == b"host":
            host = value
    if id and port.isdigit():
        return Door(id.decode("latin-1"), int(port[:6]))
    if (found := _HOST.match(host)) is not None:
        return Door(found[2].decode().lower(), int(found[1]), by_name=True)
    return None
