"""Who asks: the one check that every surface shares.

A request carries a key or a token, as `Authorization: Bearer …` or `X-API-Key: …`. A browser cannot
set headers on a WebSocket; it offers the subprotocol `capsule.key.` + base64url(KEY) without
padding, beside the one it wants to speak. Keys are never taken from the URL: those end up in logs.

What is presented is, in this order, one of the configured keys, one that was made with
`capsule key create`, or a JSON Web Token. As soon as there is any key, or tokens are set up, or the
server listens beyond loopback, every request needs one; until then everybody is the operator.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator
from dataclasses import replace

from starlette.types import Scope

from capsule.config import Config, is_loopback
from capsule.edge.errors import invalid_field
from capsule.edge.tokens import Tokens, looks_like_one
from capsule.errors import ForbiddenError, InvalidError, UnauthenticatedError
from capsule.service.caller import OPERATOR, Caller, KeyScope, check_tenant
from capsule.service.keys import Keys

KEY_PROTOCOL = "capsule.key."
AS_TENANT = b"x-capsule-tenant"
CALLER = "capsule.caller"
ADDRESS = "capsule.address"
NOBODY = Caller(tenant="", scopes=frozenset(), key_id="")  # has nothing, and may do nothing
_MAX_KEY = 8192  # a token may have a few thousand characters
_WORDS = re.compile(r"[\s,]+")
_PARTS = re.compile(r"[\s,;:=\"'<>()\[\]{}]+")
_URL_SAFE = str.maketrans("+/", "-_")
_HINT = "send the header 'Authorization: Bearer KEY'"


def caller_of(scope: Scope) -> Caller:
    """Whoever the guard let in."""
    found: Caller = scope[CALLER]
    return found


class Identity:
    def __init__(self, config: Config, keys: Keys) -> None:
        """May read a file, and blocks. Raises InvalidError."""
        self._static = Caller(key_id="static")
        self._digests = [_digest(key) for key in config.api_keys]
        self._keys = keys
        self._tokens = Tokens(config, keys.tasks) if config.takes_tokens else None
        self._closed = bool(config.api_keys) or config.takes_tokens or not is_loopback(config.host)

    @property
    def asks(self) -> bool:
        """Whether anybody needs a key here."""
        return self._closed or self._keys.any

    async def holder(self, key: str) -> Caller | None:
        """Whose key or token this is; None: it is none of ours. One that is over is nobody's."""
        try:
            return await self._find(key)
        except UnauthenticatedError:
            return None if looks_like_one(key) else NOBODY

    async def caller(self, scope: Scope) -> Caller:
        """Raises UnauthenticatedError, ForbiddenError (to act for a tenant), UnavailableError."""
        _, key = next(presented(scope), (b"", None))
        if key is not None:
            caller = await self._known(key)
        elif self.asks:
            raise UnauthenticatedError("no API key", hint=_HINT)
        else:
            caller = OPERATOR
        return acting(caller, scope)

    async def _known(self, presented: str) -> Caller:
        if (caller := await self._find(presented)) is not None:
            return caller
        if not self.asks:
            return OPERATOR  # nobody is asked here, so whatever is sent is as good as nothing
        raise UnauthenticatedError("unknown API key", hint=_HINT)

    async def _find(self, presented: str) -> Caller | None:
        """Raises UnauthenticatedError for what is over, or a token that is none of ours."""
        if self._is_static(presented):
            return self._static
        if (caller := self._keys.caller(presented)) is not None:
            return caller
        if self._tokens is not None and looks_like_one(presented):
            return await self._tokens.caller(presented)
        return None

    def _is_static(self, key: str) -> bool:
        # Always against every key, and over digests of one length: the time tells nothing.
        presented = _digest(key) if self._digests else b""
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, presented)
        return found


def acting(caller: Caller, scope: Scope) -> Caller:
    """An admin in the place of another tenant. Raises ForbiddenError, InvalidError."""
    wanted = dict(scope["headers"]).get(AS_TENANT)
    name = caller.tenant if wanted is None else wanted.decode("latin-1").strip()
    if name == caller.tenant:
        return caller
    if KeyScope.ADMIN not in caller.scopes:
        raise ForbiddenError(
            f"only a key with the scope {KeyScope.ADMIN} may act for another tenant",
            hint="leave out the header X-Capsule-Tenant",
        )
    try:
        return replace(caller, tenant=check_tenant(name))
    except InvalidError as error:
        raise invalid_field("X-Capsule-Tenant", error.message) from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def presented(scope: Scope) -> Iterator[tuple[bytes, str]]:
    """What may be a key, and the header it is in; the strongest first."""
    for value in _all(scope, b"authorization"):
        scheme, _, token = value.partition(b" ")
        if scheme.lower() == b"bearer" and token:
            yield b"authorization", _text(token)
    for key in filter(None, _all(scope, b"x-api-key")):
        yield b"x-api-key", _text(key)
    for name in scope.get("subprotocols", ()):
        if name.startswith(KEY_PROTOCOL):
            text = name.removeprefix(KEY_PROTOCOL)[: 2 * _MAX_KEY]
            yield b"sec-websocket-protocol", _from_base64url(text)


def words_of(value: bytes) -> frozenset[str]:
    """What may be a key in a header's value, in whatever form somebody has put it there. It opens
    nothing: it is for whoever must not show a key to others.
    """
    text = value.decode("utf-8", "surrogateescape").strip()
    scheme, _, rest = text.replace("\t", " ").partition(" ")
    found = {text, rest.strip(), *_WORDS.split(text), *_PARTS.split(text)}
    found |= {word.partition("=")[2].strip("\"'") for word in found}
    if scheme.lower() == "basic":
        found.update(_from_base64url(rest.strip().translate(_URL_SAFE)).split(":"))
    return frozenset(filter(None, found))


def _all(scope: Scope, wanted: bytes) -> list[bytes]:
    """Every value that a header has, the last first: it is the one that others go by."""
    return [value for name, value in scope["headers"] if name == wanted][::-1]


def _text(key: bytes) -> str:
    return key.strip()[:_MAX_KEY].decode("utf-8", "surrogateescape")


def _from_base64url(text: str) -> str:
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return ""
    return data.decode("utf-8", "surrogateescape")
