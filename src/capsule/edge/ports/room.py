"""Who may come to a sandbox's port, and what becomes of those who do.

A sandbox's ports are `private` (for its tenant, who shows a key), `public` (for whoever knows its
id, which cannot be guessed), or for who has a token. Without keys on the server they are open, as
all else is. A page from a sandbox has an origin of its own, and so do requests to it: neither
Capsule's rules for pages nor its keys are the program's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import NamedTuple, Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from capsule.config import Config
from capsule.edge.addresses import Addresses
from capsule.edge.body import unhurried
from capsule.edge.drain import Gate, cut
from capsule.edge.e2b.doors import Door
from capsule.edge.errors import Answer, understand
from capsule.edge.identity import ADDRESS, KEY_PROTOCOL, Identity, acting, presented, words_of
from capsule.edge.ports import http, pages, socket
from capsule.edge.ports.headers import Origin, framing, inwards
from capsule.edge.ports.tls import Tls
from capsule.edge.sockets import Left
from capsule.errors import (
    CapsuleError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    WrongStateError,
)
from capsule.link.stream import ByteStream
from capsule.service import Service
from capsule.service.caller import Caller, KeyScope
from capsule.service.ports import CLOSED, PortStream
from capsule.service.values import Sandbox

TOKEN = b"e2b-traffic-access-token"
VISITOR = "sandbox-port"  # who has no key, and needs none
# In the scope, from our server: of a WebSocket, takes messages so long; ours are shorter.
TAKE_MESSAGES = "capsule.take_messages"

_WITH_KEYS = frozenset({b"authorization", b"x-api-key", b"x-access-token"})
_MAX_WORDS = 256  # in one header


class Tokens(Protocol):
    """What opens a sandbox beside keys."""

    def opens_ports(self, id: str, token: str) -> bool: ...
    def is_one(self, id: str, value: str) -> bool:
        """Whether this is a token of the sandbox, of whatever kind."""


class Shown(NamedTuple):
    """What a client shows of itself."""

    callers: list[Caller]
    secret: frozenset[bytes]  # names of headers that are not for the program


class Ports:
    def __init__(
        self,
        service: Service,
        identity: Identity,
        config: Config,
        gate: Gate,
        tokens: Tokens,
        secure: Callable[[Sandbox], Collection[int]],
    ) -> None:
        """`secure`: at which of a sandbox's ports programs speak TLS."""
        self._service = service
        self._identity = identity
        self._addresses = Addresses(config.trusted_proxies)
        self._gate = gate
        self._tokens = tokens
        self._secure = secure

    async def enter(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send)
        try:
            await self._enter(door, scope, receive, answer)
        except Left:
            pass
        except http.Cut:
            await cut(scope)
        except Exception as error:  # the edge: whatever it is becomes an answer
            told = error if isinstance(error, pages.PortError) else pages.of(understand(error))
            if answer.begun:
                await cut(scope)
            else:
                await pages.answer(told, door.id, door.port, scope, receive, send)

    async def _enter(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        if not 1 <= door.port <= 65535:
            raise pages.no_port(door.port)
        shown = await self._shown(door.id, scope)
        sandbox = self._admitted(door.id, scope, shown)
        self._gate.admit()
        origin = self._origin(sandbox, door.port, scope)
        headers, closing = inwards(scope, origin, shown.secret), self._gate.closing
        async with aclosing(await self._dial(door, shown)) as dialled:
            stream: ByteStream = dialled
            if door.port in self._secure(sandbox):
                stream = tls = Tls(dialled)
                await tls.open(door.port)
            if scope["type"] == "http":
                await _carry_request(stream, scope, receive, send, headers, closing)
            else:
                protocols = [p for p in scope["subprotocols"] if not p.startswith(KEY_PROTOCOL)]
                if (take := scope.get(TAKE_MESSAGES)) is not None:
                    take(socket.MAX_MESSAGE)
                await socket.carry(stream, scope, receive, send, headers, protocols, closing)

    async def _shown(self, id: str, scope: Scope) -> Shown:
        callers, secret = list[Caller](), set[bytes]()
        for name, key in presented(scope):
            if (caller := await self._identity.holder(key)) is not None:
                callers.append(_as_wished(caller, scope))
                secret.add(name)
        for name, value in scope["headers"]:
            if self._tokens.is_one(id, value.decode("latin-1").strip()):
                secret.add(name)
            elif name in _WITH_KEYS and name not in secret and await self._holds_one(id, value):
                secret.add(name)
        return Shown(callers, frozenset(secret))

    async def _holds_one(self, id: str, value: bytes) -> bool:
        """Whether a key of ours, or a token of the sandbox, stands in there in any form."""
        words = words_of(value)
        if len(words) > _MAX_WORDS:
            return True  # that is more than we look at
        for word in words:
            if self._tokens.is_one(id, word) or await self._identity.holder(word) is not None:
                return True
        return False

    async def admit(self, id: str, scope: Scope) -> str:
        """Who comes, in the trail's words. Raises PortError where they may not."""
        shown = await self._shown(id, scope)
        tenant = self._admitted(id, scope, shown).tenant
        own = [caller.key_id for caller in shown.callers if caller.tenant == tenant]
        return own[0] if own else VISITOR

    async def stranger(self, id: str, scope: Scope) -> bool:
        """Whether a key of ours is shown, and none of the sandbox's tenant, if there is one."""
        callers = (await self._shown(id, scope)).callers
        try:
            tenant = self._service.get(id).tenant
        except (NotFoundError, GoneError):
            return bool(callers)
        return bool(callers) and all(caller.tenant != tenant for caller in callers)

    def _admitted(self, id: str, scope: Scope, shown: Shown) -> Sandbox:
        missing = pages.not_found(known_caller=bool(shown.callers))
        try:
            sandbox = self._service.get(id)
        except (NotFoundError, GoneError):
            raise missing from None
        token = dict(scope["headers"]).get(TOKEN, b"").decode("latin-1")
        if sandbox.ports == "public" or self._tokens.opens_ports(id, token):
            return sandbox
        own = [caller for caller in shown.callers if caller.tenant == sandbox.tenant]
        if any(KeyScope.RUN in caller.scopes for caller in own):
            return sandbox
        if own:
            raise pages.may_not_run()
        if sandbox.ports == "token" and not shown.callers:
            raise pages.wrong_token() if token else pages.no_token()
        if not self._identity.asks:
            return sandbox
        raise missing

    def _origin(self, sandbox: Sandbox, port: int, scope: Scope) -> Origin:
        host = dict(scope["headers"]).get(b"host", b"")
        told = sandbox.request_host.replace("${PORT}", str(port)).encode() or host
        scope[ADDRESS] = address = self._addresses.of(scope)
        return Origin(host, told, address, self._scheme(scope))

    def _scheme(self, scope: Scope) -> str:
        secure = scope["scheme"] in ("https", "wss") or self._addresses.over_tls(scope)
        return "https" if secure else "http"

    async def _dial(self, door: Door, shown: Shown) -> PortStream:
        try:
            return await self._service.ports.dial(door.id, door.port)
        except (NotFoundError, GoneError, WrongStateError):
            raise pages.not_found(known_caller=bool(shown.callers)) from None
        except CapsuleError as error:
            if error.details.get("cause") == CLOSED:
                raise pages.closed(door.port) from None
            raise


def _as_wished(caller: Caller, scope: Scope) -> Caller:
    """For the tenant that an admin names. Who may name none comes for their own."""
    try:
        return acting(caller, scope)
    except (ForbiddenError, InvalidError):
        return caller


async def _carry_request(
    stream: ByteStream,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: list[tuple[bytes, bytes]],
    closing: asyncio.Event,
) -> None:
    unhurried(Request(scope))
    if scope["method"] == "CONNECT":
        raise pages.bad_request("CONNECT is for proxies, and a program in a sandbox is none")
    try:
        length = framing(scope["headers"])
    except ValueError as error:
        raise pages.bad_request(f"how long the request is, is not clear: {error}") from None
    kept = [h for h in headers if h[0] != b"content-length"]
    await http.carry(stream, scope, receive, send, [*kept, *length], closing)
