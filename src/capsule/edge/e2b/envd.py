"""What answers at port 49983 of a sandbox: E2B's envd, as far as its SDKs use it.

A request names one of `calls`, which are given a `Guest`: the sandbox, and as whom. What a call
raises becomes an answer here, in Connect's words for an RPC, and in E2B's own for plain HTTP.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capsule.edge.e2b.access import Access, same
from capsule.edge.e2b.connect import RpcError
from capsule.edge.e2b.doors import Door
from capsule.edge.errors import encode, understand
from capsule.errors import CapsuleError, GoneError, NotFoundError
from capsule.model import State
from capsule.service import Service

NO_TOKEN = "unauthorized access, please provide a valid access token or method signing if supported"


class Guest(NamedTuple):
    id: str  # of the sandbox
    user: str | None  # who the request wants to be there; None: the sandbox's user


Call = Callable[[Guest, Request], Awaitable[Response]]


class Envd:
    def __init__(self, service: Service, access: Access, calls: Mapping[tuple[str, str], Call]):
        self._service = service
        self._access = access
        self._calls = {("GET", "/health"): healthy, **calls}

    async def enter(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = "/" + scope["path"].lstrip("/")
        call = self._calls.get((scope.get("method", ""), path))
        if call is None:
            answer = plain(404, f"no such path: {path[:100]}")
        else:
            answer = await self._answer(call, door, request, path)
        await answer(scope, receive, send)

    async def _answer(self, call: Call, door: Door, request: Request, path: str) -> Response:
        if not is_running(self._service, door.id):
            return not_running(door.id)
        # A link to a file may be signed instead, which is for `files` to see.
        if path not in ("/health", "/files"):
            token = request.headers.get("x-access-token", "")
            if not same(token, self._access.token(door.id)):
                return plain(401, NO_TOKEN)
        rpc = path.count("/") == 2
        try:
            return await call(Guest(door.id, _user(request)), request)
        except RpcError as error:
            return json(error.body(), error.status)
        except Exception as error:  # the edge: whatever it is becomes an answer
            known = understand(error)
            if isinstance(known, GoneError):
                return not_running(door.id)
            if rpc:
                return json(RpcError.of(known).body(), RpcError.of(known).status)
            return plain(507 if known.code == "no_space" else known.http_status, _text(known))


async def healthy(guest: Guest, request: Request) -> Response:
    return Response(status_code=204)


def is_running(service: Service, id: str) -> bool:
    """Or is about to be, for whoever needs it."""
    try:
        found = service.get(id)
    except (NotFoundError, GoneError):
        return False
    return found.state is State.RUNNING or (found.state is State.PAUSED and found.auto_resume)


def not_running(id: str) -> Response:
    """The SDKs look for these words, and for this status."""
    return json({"sandboxId": id, "message": "The sandbox was not found", "code": 502}, 502)


def plain(status: int, message: str) -> Response:
    return json({"code": status, "message": message}, status)


def json(body: object, status: int = 200) -> Response:
    return Response(encode(body), status_code=status, media_type="application/json")


def _text(error: CapsuleError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


def _user(request: Request) -> str | None:
    """Of `Authorization: Basic base64("NAME:")`."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError):
        raise RpcError("unauthenticated", "the user's name is not readable") from None
