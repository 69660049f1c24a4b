"""What answers at port 49999 of a sandbox: E2B's code interpreter, on the sandbox's contexts.

    POST   /execute                 {code, context_id | language, env_vars}: a line per event
    POST   /contexts                {language, cwd}
    GET    /contexts                two are always there, though nobody may have started them yet
    DELETE /contexts/{id}
    POST   /contexts/{id}/restart
    GET    /health

A run's time is the client's: it leaves when it has waited long enough, and the run is interrupted.
Errors are plain text, as the SDKs show it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from capsule.config import Config
from capsule.edge.body import read_json
from capsule.edge.drain import Gate
from capsule.edge.e2b.access import Access, same
from capsule.edge.e2b.doors import Door
from capsule.edge.e2b.envd import HOLDER, NO_TOKEN, not_running, sign_in
from capsule.edge.e2b.guests import running
from capsule.edge.e2b.lines import Lines
from capsule.edge.e2b.magics import plain
from capsule.edge.errors import encode, sentence, understand
from capsule.edge.identity import CALLER, Identity
from capsule.edge.ports import pages
from capsule.edge.ports.room import VISITOR, Ports
from capsule.edge.shapes import Path, Shape
from capsule.errors import CapsuleError, GoneError, NotFoundError, WrongStateError
from capsule.service import ContextCall, ContextInfo, ContextRun, LiveRun, Service
from capsule.service.caller import Caller
from capsule.service.context_calls import code_of
from capsule.service.values import Sandbox

DEFAULTS = {"default-python": "python", "default-javascript": "javascript"}
KNOWN = {"js": "javascript", "ts": "typescript", "py": "python", "sh": "bash"}
T = TypeVar("T")
Call = Callable[[Sandbox, Request, str], Awaitable[Response]]
NAME = "{name}"
EXECUTE = ("POST", "execute")
SITE = "sec-fetch-site"
BOTH = "Only one of context_id or language can be provided"
IN_LINE = 5.0  # seconds until a run that has not begun is answered, so that the client knows


class Execute(Shape, kw_only=True, frozen=True, forbid_unknown_fields=False):
    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


class MakeContext(Shape, kw_only=True, frozen=True, forbid_unknown_fields=False):
    language: str | None = None
    cwd: Path | None = None


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Interpreter:
    def __init__(
        self,
        service: Service,
        access: Access,
        identity: Identity,
        ports: Ports,
        gate: Gate,
        config: Config,
    ) -> None:
        self._service = service
        self._identity = identity
        self._access = access
        self._ports = ports
        self._gate = gate
        self._most = config.max_exec_timeout
        self.calls: dict[tuple[str, ...], Call] = {
            ("GET", "health"): self._healthy,
            EXECUTE: self._execute,
            ("POST", "contexts"): self._create,
            ("GET", "contexts"): self._list,
            ("DELETE", "contexts", NAME): self._delete,
            ("POST", "contexts", NAME, "restart"): self._restart,
        }

    async def enter(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            told = pages.bad_request("there is no WebSocket at this port")
            await pages.answer(told, door.id, door.port, scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            answer = await self._answer(door, request)
        except Refused as refused:
            answer = PlainTextResponse(refused.text, refused.status)
        except pages.PortError as error:
            await pages.answer(error, door.id, door.port, scope, receive, send)
            return
        except Exception as error:  # the edge: whatever it is becomes an answer
            answer = self._refusal(door.id, understand(error))
        await answer(scope, receive, send)

    def _refusal(self, id: str, error: CapsuleError) -> Response:
        if isinstance(error, GoneError | WrongStateError) and running(self._service, id) is None:
            return not_running(id)
        return PlainTextResponse(sentence(error), error.http_status)

    async def _answer(self, door: Door, request: Request) -> Response:
        parts = request.url.path.strip("/").split("/")
        call = request.method, *parts[:1], *(NAME for _ in parts[1:2]), *parts[2:]
        who = await self._admit(door.id, request, call == EXECUTE)
        sandbox = running(self._service, door.id)
        if sandbox is None:
            return not_running(door.id)
        if call not in self.calls:
            raise Refused(404, f"no such path: {request.method} {request.url.path[:100]}")
        if "contexts" in call and _of_page(request) and not self._has_token(door.id, request):
            raise Refused(403, "web pages need the sandbox's token, as X-Access-Token")
        if request.method != "GET":
            sign_in(self._identity, sandbox, request.scope, who)
        return await self.calls[call](sandbox, request, "".join(parts[1:2]))

    async def _admit(self, id: str, request: Request, takes_token: bool) -> str:
        """Who it is. Code is for who has the sandbox's token. With all else the SDKs send none, so
        that is open to whom the sandbox's ports are, too."""
        if self._has_token(id, request):
            return HOLDER
        if not takes_token:
            return await self._ports.admit(id, request.scope)
        if await self._ports.stranger(id, request.scope):
            raise pages.not_found(known_caller=True)
        raise Refused(401, NO_TOKEN)

    def _has_token(self, id: str, request: Request) -> bool:
        return same(request.headers.get("x-access-token", ""), self._access.token(id))

    async def _healthy(self, sandbox: Sandbox, request: Request, name: str) -> Response:
        return PlainTextResponse("OK")

    async def _create(self, sandbox: Sandbox, request: Request, name: str) -> Response:
        """A folder that is not there is made, but not for a visitor of public ports."""
        self._gate.admit()
        body = await read_json(request, MakeContext)
        language = self._language(sandbox, body.language)
        makes = body.cwd is not None and not _visits(sandbox, request)
        call = ContextCall(language, cwd=body.cwd, make_cwd=makes)
        return _json(_view(await self._service.contexts.create(sandbox.id, call)))

    async def _list(self, sandbox: Sandbox, request: Request, name: str) -> Response:
        """Those that are always there first, then the oldest; the last is the newest."""
        home = self._service.environ(sandbox.id).get("HOME", "/")
        able = self._service.contexts.languages(sandbox.id)
        found = {
            name: {"id": name, "language": language, "cwd": home}
            for name, language in DEFAULTS.items()
            if language in able
        }
        found |= {each.id: _view(each) for each in await self._service.contexts.list(sandbox.id)}
        return _json(list(found.values()))

    async def _delete(self, sandbox: Sandbox, request: Request, name: str) -> Response:
        await self._known(name, self._service.contexts.delete(sandbox.id, name))
        return PlainTextResponse("")

    async def _restart(self, sandbox: Sandbox, request: Request, name: str) -> Response:
        """One that nobody has started yet is as new."""
        if name not in DEFAULTS:
            await self._known(name, self._service.contexts.restart(sandbox.id, name))
            return PlainTextResponse("")
        try:
            await self._service.contexts.restart(sandbox.id, name)
        except NotFoundError:
            await self._service.contexts.warm(sandbox.id, DEFAULTS[name])
        return PlainTextResponse("")

    async def _known(self, name: str, work: Awaitable[T]) -> T:
        try:
            return await work
        except NotFoundError:
            raise Refused(404, f"Context {name} not found") from None

    async def _execute(self, sandbox: Sandbox, request: Request, name: str) -> Response:
        self._gate.admit()
        body = await read_json(request, Execute)
        if body.context_id and body.language:
            raise Refused(400, BOTH)
        starting = asyncio.ensure_future(self._start(sandbox, body))
        try:
            await asyncio.wait({starting}, timeout=IN_LINE)
        except asyncio.CancelledError:
            starting.cancel()
            raise
        if starting.done():
            starting.result()  # what it raises is the answer

        async def interrupt(live: LiveRun) -> None:
            await self._service.contexts.interrupt(sandbox.id, live.context)

        return Lines(starting, interrupt, lambda: running(self._service, sandbox.id) is not None)

    async def _start(self, sandbox: Sandbox, body: Execute) -> LiveRun:
        """An interpreter that has died is started again, as Jupyter does."""
        contexts = self._service.contexts
        name, language = body.context_id, "python"
        if name is None:
            language = self._language(sandbox, body.language)
        elif default := DEFAULTS.get(name):
            name, language = None, default
        else:
            language = await self._known(name, contexts.language(sandbox.id, name))
        call = ContextRun(
            plain(code_of(body.code, "python")) if language == "python" else body.code,
            context=name,
            language=language,
            timeout=self._most,
            env=body.env_vars or {},
        )
        try:
            return await contexts.start(sandbox.id, call)
        except WrongStateError as error:
            dead = error.details.get("context")
            if error.details.get("state") != "dead" or not isinstance(dead, str):
                raise
            await contexts.restart(sandbox.id, dead)
            return await contexts.start(sandbox.id, call)

    def _language(self, sandbox: Sandbox, name: str | None) -> str:
        """Raises Refused, for those that E2B has and the sandbox has not."""
        wanted = (name or "python").lower()
        wanted, able = KNOWN.get(wanted, wanted), self._service.contexts.languages(sandbox.id)
        if wanted not in able:
            raise Refused(
                400, f"Language {wanted[:40]} is not in this sandbox; it has: {', '.join(able)}"
            )
        return wanted


def _visits(sandbox: Sandbox, request: Request) -> bool:
    """It comes through a port that is open to all, and shows nothing."""
    caller: Caller = request.scope[CALLER]
    return sandbox.ports == "public" and caller.key_id == VISITOR


def _of_page(request: Request) -> bool:
    return "origin" in request.headers or SITE in request.headers


def _view(info: ContextInfo) -> dict[str, str]:
    return {"id": info.id, "language": info.language, "cwd": info.cwd}


def _json(body: object) -> Response:
    return Response(encode(body), media_type="application/json")
