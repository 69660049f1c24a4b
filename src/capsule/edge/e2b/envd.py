"""What answers at port 49983 of a sandbox: E2B's envd, as far as its SDKs use it.

    process       programs and terminals       process_table  which process is which exec
    filesystem    files and folders            watchers       what changes in them
    file_content  what is in files             rpc            how calls are answered

A request names one of `calls`, which are given a `Guest`: the sandbox, and as whom. What a call
raises becomes an answer here, in Connect's words for an RPC, and in E2B's own for plain HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capsule.edge.drain import Gate
from capsule.edge.e2b.access import Access, same
from capsule.edge.e2b.connect import RpcError
from capsule.edge.e2b.doors import Door
from capsule.edge.e2b.guests import Guest, guest_of, name_in, running
from capsule.edge.e2b.links import Link, Links
from capsule.edge.e2b.rpc import Call, is_stream, json, refusal
from capsule.edge.errors import HttpError, send_error, sentence, understand
from capsule.edge.identity import ADDRESS, CALLER, Identity
from capsule.edge.ports.pages import PortError
from capsule.edge.ports.room import Ports
from capsule.errors import CapsuleError, GoneError, UnavailableError, WrongStateError
from capsule.service import Service
from capsule.service.caller import OPERATOR, Caller
from capsule.service.values import Sandbox

NO_TOKEN = "unauthorized access, please provide a valid access token or method signing if supported"
NO_SOCKET = "no WebSocket is at this port"
FILES = "/files"
HEALTH = "/health"
BEGINS = "/process.Process/Start"  # refused while the server stops; what runs may end
# Calls that change nothing: who only looks leaves no trail.
LOOKS = frozenset(
    {"health", "envs", "metrics", "List", "Connect", "Stat", "ListDir", "WatchDir"}
    | {"CreateWatcher", "GetWatcherEvents", "RemoveWatcher"}
)
HOLDER = "sandbox-token"  # what the trail calls whoever has it


class Envd:
    def __init__(
        self,
        service: Service,
        access: Access,
        identity: Identity,
        ports: Ports,
        gate: Gate,
        calls: Mapping[tuple[str, str], Call],
    ) -> None:
        self._service = service
        self._identity = identity
        self._access = access
        self._ports = ports
        self._gate = gate
        self._links = Links(access, service.ids)
        self.calls = {("GET", HEALTH): healthy, **calls}
        self._paths = {path for _, path in self.calls}

    async def enter(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send_error(scope, receive, send, HttpError(404, "not_found", NO_SOCKET))
            return
        request = Request(scope, receive)
        try:
            id = door.id or await self._links.owner(Link.of(request), scope[ADDRESS])
            answer = await self._entered(id, request) if id else self._of_nobody(request)
        except PortError as error:
            answer = not_running(door.id, error)
        except CapsuleError as error:
            await send_error(scope, receive, send, error)
            return
        await answer(scope, receive, send)

    def _of_nobody(self, request: Request) -> Response:
        return plain(401, Link.of(request).late() or "invalid signature")

    async def _entered(self, id: str, request: Request) -> Response:
        """Who may not is told nothing of the sandbox, not even whether there is one."""
        path = "/" + request.scope["path"].lstrip("/")
        if refused := self._refused(id, request, path):
            if path == HEALTH:
                await self._ports.admit(id, request.scope)
            elif await self._ports.stranger(id, request.scope):
                return plain(404, "The sandbox was not found")
            else:
                return plain(401, refused)
        sandbox = running(self._service, id)
        return not_running(id) if sandbox is None else await self._answer(sandbox, request, path)

    async def _answer(self, sandbox: Sandbox, request: Request, path: str) -> Response:
        call = self.calls.get((request.method, path))
        if call is None:
            return self._nowhere(request, path)
        if path.rpartition("/")[2] not in LOOKS:
            sign_in(self._identity, sandbox, request.scope)
        rpc = path.count("/") == 2
        try:
            if path == BEGINS:
                self._admit()
            user = request.query_params.get("username") if path == FILES else name_in(request)
            return await call(guest_of(self._service, sandbox, user or None), request)
        except RpcError as error:
            if is_stream(request):
                return refusal(error)
            return json(error.body(), error.status) if rpc else plain(error.status, error.message)
        except Exception as error:  # the edge: whatever it is becomes an answer
            return self._refusal(sandbox.id, understand(error), rpc)

    def _admit(self) -> None:
        try:
            self._gate.admit()
        except UnavailableError as error:
            raise RpcError.of(error) from None

    def _refused(self, id: str, request: Request, path: str) -> str | None:
        """Why: neither the sandbox's token nor, for a file, its signature."""
        given, token = request.headers.get("x-access-token"), self._access.token(id)
        if given is not None and same(given, token):
            return None
        if path != FILES or given is not None:
            return NO_TOKEN
        return Link.of(request).problem(token)

    def _refusal(self, id: str, error: CapsuleError, rpc: bool) -> Response:
        if isinstance(error, GoneError | WrongStateError) and running(self._service, id) is None:
            return not_running(id)
        if rpc:
            return json(RpcError.of(error).body(), RpcError.of(error).status)
        return plain(error.http_status, sentence(error))

    def _nowhere(self, request: Request, path: str) -> Response:
        if path in self._paths:
            return plain(405, f"{request.method} is not for {path}")
        if path.count("/") == 2:
            return json({"code": "unimplemented", "message": f"no such call: {path[:100]}"}, 404)
        return plain(404, f"no such path: {path[:100]}")


async def healthy(guest: Guest, request: Request) -> Response:
    return Response(status_code=204)


def sign_in(identity: Identity, sandbox: Sandbox, scope: Scope, who: str = HOLDER) -> None:
    """Whoever has a sandbox's token acts for its tenant: so the trail and the log have it."""
    key = who if identity.asks else OPERATOR.key_id
    scope[CALLER] = Caller(sandbox.tenant, frozenset(), key)
    scope["path_params"] = {"id": sandbox.id}
    structlog.contextvars.bind_contextvars(tenant=sandbox.tenant, key=key)


def not_running(id: str, error: PortError | None = None) -> Response:
    """The SDKs look for these words, and for this status."""
    status, message = (error.status, error.message) if error else (502, "The sandbox was not found")
    return json({"sandboxId": id, "message": message, "code": status}, status)


def plain(status: int, message: str) -> Response:
    return json({"code": status, "message": message}, status)
