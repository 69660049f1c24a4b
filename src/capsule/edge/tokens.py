"""JSON Web Tokens: who somebody is, by the word of an issuer that the operator trusts.

Which keys there are decides which algorithms there are, never the token: a secret of the
configuration is for HS256 alone, a public key for RS256 or ES256, as its kind is. `none` and
everything else is refused before anything is computed.

A token that was found good is good for a minute without another look, or until it expires; so a
request with a token costs what one with a key does.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from capsule.config import Config
from capsule.edge.jwks import KeySet
from capsule.errors import InvalidError, UnauthenticatedError
from capsule.service.caller import Caller, KeyScope, widened
from capsule.service.tasks import Tasks

if TYPE_CHECKING:
    from jwt.types import Options

log = logging.getLogger("capsule.edge")

SHARED = "HS256"
PUBLIC = {"RS256": "RSA", "ES256": "EC"}
GOOD_FOR = 60.0
MOST_KNOWN = 4096
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_LOOKS = re.compile(r"eyJ[\w-]*\.[\w-]+\.[\w-]*", re.ASCII)


class Known(NamedTuple):
    caller: Caller
    until: float  # wall clock


def looks_like_one(token: str) -> bool:
    return _LOOKS.fullmatch(token) is not None


class Tokens:
    def __init__(self, config: Config, tasks: Tasks) -> None:
        """Reads the public key, and blocks. Raises InvalidError."""
        importlib.import_module("jwt")  # a twentieth of a second, before anybody waits
        self._config = config
        self._file = read_public_key(config.jwt_public_key) if config.jwt_public_key else None
        self._set = KeySet(config.jwt_jwks_url, tasks) if config.jwt_jwks_url else None
        self._known: OrderedDict[bytes, Known] = OrderedDict()

    async def caller(self, token: str) -> Caller:
        """Raises UnauthenticatedError; UnavailableError (the issuer's keys cannot be had)."""
        mark = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        known, now = self._known.get(mark), time.time()
        if known is not None and now < known.until:
            return known.caller
        claims = await self._verified(token)
        caller = self._caller(claims)
        until = min(float(claims["exp"]) + self._config.jwt_leeway, now + GOOD_FOR)
        self._known[mark] = Known(caller, until)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return caller

    async def _verified(self, token: str) -> Mapping[str, Any]:
        import jwt

        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise refused("it is no JSON Web Token") from error
        algorithm = header.get("alg", "")
        for key in await self._keys(algorithm, header.get("kid")):
            try:
                return self._decoded(token, key, algorithm)
            except jwt.InvalidSignatureError:
                continue
            except jwt.PyJWTError as error:
                raise refused(_reason(error)) from error
        raise refused("no key of its issuer has signed it")

    def _decoded(self, token: str, key: Any, algorithm: str) -> Mapping[str, Any]:
        import jwt

        config = self._config
        options: Options = {"require": ["exp"], "verify_aud": True, "verify_iss": True}
        claims: Mapping[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=config.jwt_audience,
            issuer=config.jwt_issuer,
            leeway=config.jwt_leeway,
            options=options,
        )
        return claims

    async def _keys(self, algorithm: Any, kid: Any) -> list[Any]:
        """Those that may have signed it."""
        if algorithm == SHARED:
            return [self._config.jwt_secret] if self._config.jwt_secret else []
        kind = PUBLIC.get(algorithm) if isinstance(algorithm, str) else None
        if kind is None:
            return []
        found = [self._file.key] if self._file and self._file.kind == kind else []
        if self._set is not None:
            found += await self._set.keys(kind, algorithm, kid if isinstance(kid, str) else None)
        return found

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        config = self._config
        tenant = claims.get(config.jwt_tenant_claim)
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            raise refused(f"its claim {config.jwt_tenant_claim!r} names no tenant")
        subject = str(claims.get("sub", ""))[:100]
        return Caller(
            tenant, widened(_scopes(claims.get(config.jwt_scopes_claim))), f"jwt:{subject}"
        )


def _scopes(claim: Any) -> list[KeyScope]:
    """A text with spaces (RFC 8693), or a list; `capsule:run` is `run`. Others are not for us."""
    words = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    names = {word.removeprefix("capsule:") for word in words if isinstance(word, str)}
    return [scope for scope in KeyScope if scope.value in names]


def refused(why: str) -> UnauthenticatedError:
    return UnauthenticatedError(f"token refused: {why}", hint="get a new one from its issuer")


def _reason(error: Exception) -> str:
    reasons = {
        "ExpiredSignatureError": "it has expired",
        "ImmatureSignatureError": "it is not valid yet",
        "InvalidAudienceError": "it is for another audience",
        "InvalidIssuerError": "it is of another issuer",
        "MissingRequiredClaimError": str(error)[:100],
    }
    return reasons.get(type(error).__name__, "it is malformed")


class PublicKey(NamedTuple):
    kind: str  # as a JWK says it: RSA, EC
    key: Any


def read_public_key(path: Path) -> PublicKey:
    """A PEM file. Blocks. Raises InvalidError."""
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}"
        raise InvalidError(f"setting jwt_public_key: {what}", field="jwt_public_key") from error
    except ValueError as error:
        raise InvalidError(
            f"setting jwt_public_key: {path} holds no public key in PEM",
            hint="openssl pkey -in private.pem -pubout",
            field="jwt_public_key",
        ) from error
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= 2048:
        return PublicKey("RSA", key)
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1":
        return PublicKey("EC", key)
    raise InvalidError(
        f"setting jwt_public_key: {path} is neither RSA of 2048 bits or more nor P-256",
        field="jwt_public_key",
    )
