"""JSON Web Tokens: which are accepted, and which are refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from capsule.config import Config
from capsule.edge import jwks
from capsule.edge.tokens import GOOD_FOR, Tokens, read_public_key
from capsule.errors import InvalidError, UnauthenticatedError, UnavailableError
from capsule.service.caller import Caller, KeyScope
from capsule.service.tasks import Tasks

SECRET = "a-secret-of-thirty-two-characters-or-more"
RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())


def claims(**more: Any) -> dict[str, Any]:
    made = {"sub": "ann", "tenant": "blue", "scope": "openid run", "exp": time.time() + 600, **more}
    return {name: value for name, value in made.items() if value is not None}


def public_pem(key: Any) -> bytes:
    pem: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


async def tokens(tasks: Tasks | None = None, **settings: Any) -> Tokens:
    """In a thread: it reads files."""
    owned = Tasks() if tasks is None else tasks
    return await asyncio.to_thread(lambda: Tokens(Config(**settings), owned))


def signed(key: Any, algorithm: str, kid: str | None = None, **more: Any) -> str:
    headers = {"kid": kid} if kid else None
    return jwt.encode(claims(**more), key, algorithm=algorithm, headers=headers)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    for name, key in (("rsa", RSA), ("ec", EC)):
        (tmp_path / name).write_bytes(public_pem(key))
    return {name: tmp_path / name for name in ("rsa", "ec")}


async def test_a_shared_secret() -> None:
    caller = await (await tokens(jwt_secret=SECRET)).caller(signed(SECRET, "HS256"))
    assert caller == Caller("blue", frozenset({KeyScope.READ, KeyScope.RUN}), "jwt:ann")
    known = await tokens(jwt_secret=SECRET, jwt_tenant_claim="org", jwt_scopes_claim="permissions")
    token = signed(SECRET, "HS256", org="green", permissions=["read"])
    assert await known.caller(token) == Caller("green", frozenset({KeyScope.READ}), "jwt:ann")


@pytest.mark.parametrize(("name", "key", "algorithm"), [("rsa", RSA, "RS256"), ("ec", EC, "ES256")])
async def test_a_public_key(files: dict[str, Path], name: str, key: Any, algorithm: str) -> None:
    known = await tokens(jwt_public_key=files[name])
    assert (await known.caller(signed(key, algorithm))).tenant == "blue"
    with pytest.raises(UnauthenticatedError, match="no key of its issuer"):
        await known.caller(signed(OTHER_RSA, "RS256"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"exp": time.time() - 3600}, "it has expired"),
        ({"exp": None}, "exp"),
        ({"nbf": time.time() + 3600}, "not valid yet"),
        ({"tenant": None}, "names no tenant"),
        ({"tenant": "a/b"}, "names no tenant"),
        ({"tenant": ["blue"]}, "names no tenant"),
        ({"aud": "others"}, "another audience"),
    ],
)
async def test_claims_that_are_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnauthenticatedError, match=reason):
        await (await tokens(jwt_secret=SECRET)).caller(signed(SECRET, "HS256", **more))


async def test_issuer_audience_and_leeway() -> None:
    known = await tokens(
        jwt_secret=SECRET, jwt_issuer="https://id", jwt_audience="capsule", jwt_leeway=30.0
    )
    right: dict[str, Any] = {"iss": "https://id", "aud": ["capsule", "x"]}
    for claim, ahead in (("exp", 600), ("exp", -10), ("nbf", 10)):  # within the leeway
        more: dict[str, Any] = {**right, claim: time.time() + ahead}
        token = signed(SECRET, "HS256", **more)
        assert (await known.caller(token)).tenant == "blue"
    wrong: list[dict[str, Any]] = [{"aud": None}, {"iss": None}, {"iss": "https://x"}]
    for each in wrong:
        with pytest.raises(UnauthenticatedError):
            await known.caller(signed(SECRET, "HS256", **(right | each)))


async def test_a_checked_token_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = await tokens(jwt_secret=SECRET, jwt_leeway=0.0)
    now = time.time()
    checked = {
        until: signed(SECRET, "HS256", exp=exp, sub=str(exp))
        for exp, until in ((now + 20, now + 20), (now + 3600, now + GOOD_FOR))
    }
    for token in checked.values():
        assert await known.caller(token)

    def expired(*_: object) -> Any:
        raise jwt.ExpiredSignatureError

    monkeypatch.setattr(known, "_decoded", expired)
    for until, token in checked.items():
        monkeypatch.setattr(time, "time", lambda until=until: until - 5)
        assert await known.caller(token)
        monkeypatch.setattr(time, "time", lambda until=until: until + 5)
        with pytest.raises(UnauthenticatedError, match="expired"):
            await known.caller(token)


def forged(header: dict[str, Any], signature: bytes = b"") -> str:
    parts = (json.dumps(header).encode(), json.dumps(claims()).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


async def test_no_algorithm_is_none(files: dict[str, Path]) -> None:
    for known in (await tokens(jwt_secret=SECRET), await tokens(jwt_public_key=files["rsa"])):
        for name in ("none", "None", "NONE", "nOnE", "", None, 5, ["HS256"]):
            with pytest.raises(UnauthenticatedError):
                await known.caller(forged({"alg": name, "typ": "JWT"}))
    for algorithm in ("HS384", "HS512"):
        with pytest.raises(UnauthenticatedError):
            await (await tokens(jwt_secret=SECRET * 2)).caller(signed(SECRET * 2, algorithm))


async def test_a_public_key_is_no_secret(files: dict[str, Path]) -> None:
    """A token that is signed with the public key and says HS256 is refused."""
    known = await tokens(jwt_public_key=files["rsa"])
    unsigned = forged({"alg": "HS256", "typ": "JWT"}).rpartition(".")[0]
    for material in (public_pem(RSA), public_pem(RSA).strip()):
        mac = hmac.new(material, unsigned.encode(), hashlib.sha256).digest()
        token = f"{unsigned}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"
        with pytest.raises(UnauthenticatedError):
            await known.caller(token)
    with pytest.raises(UnauthenticatedError):
        await (await tokens(jwt_secret=SECRET)).caller(signed(RSA, "RS256"))


@pytest.mark.parametrize(
    ("scope", "may"),
    [
        ("read", {"read"}),
        ("openid profile", set()),
        ("capsule:admin", {"read", "run", "admin"}),
        (["run", "email"], {"read", "run"}),
        (7, set()),
        (None, set()),
    ],
)
async def test_unknown_scopes_are_ignored(scope: Any, may: set[str]) -> None:
    caller = await (await tokens(jwt_secret=SECRET)).caller(signed(SECRET, "HS256", scope=scope))
    assert caller.scopes == may


def test_a_key_file_is_checked_at_the_start(tmp_path: Path) -> None:
    weak = tmp_path / "weak"
    weak.write_bytes(public_pem(ec.generate_private_key(ec.SECP384R1())))
    private = tmp_path / "private"
    private.write_bytes(RSA.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for path, problem in (
        (tmp_path / "missing", "No such file"),
        (weak, "neither RSA"),
        (private, "no public key"),
    ):
        with pytest.raises(InvalidError, match=problem):
            read_public_key(path)


class Issuer:
    """A server with a key set."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []
        self.asked = 0
        self.broken = self.rude = False
        self.answers = threading.Event()
        self.answers.set()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                issuer.answers.wait(10)
                if issuer.rude:
                    self.wfile.write(b"what?\r\n\r\n")
                    return
                self.send_response(500 if issuer.broken else 200)
                self.end_headers()
                self.wfile.write(json.dumps({"keys": issuer.keys}).encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/jwks"

    def publish(self, **keys: Any) -> None:
        self.keys = []
        for kid, key in keys.items():
            algorithm: Any = jwt.get_algorithm_by_name("RS256" if hasattr(key, "sign") else "HS256")
            if isinstance(key, ec.EllipticCurvePrivateKey):
                algorithm = jwt.get_algorithm_by_name("ES256")
            public = key.public_key() if hasattr(key, "public_key") else key
            self.keys.append({**algorithm.to_jwk(public, as_dict=True), "kid": kid})


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


async def test_an_issuers_key_set(issuer: Issuer) -> None:
    issuer.publish(one=RSA, two=EC)
    known = await tokens(jwt_jwks_url=issuer.url)
    assert await known.caller(signed(RSA, "RS256", "one"))
    assert await known.caller(signed(EC, "ES256", "two"))
    assert await known.caller(signed(RSA, "RS256"))  # without a key id any of the kind
    assert issuer.asked == 1
    for token in (
        signed(OTHER_RSA, "RS256", "one"),
        signed(RSA, "RS256", "two"),
        signed(OTHER_RSA, "RS256", "three"),
    ):
        with pytest.raises(UnauthenticatedError, match="no key of its issuer"):
            await known.caller(token)
    assert issuer.asked == 1  # for unknown names at most every ten seconds


async def test_a_new_key_of_the_issuer_is_fetched(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "AGAIN", 0.0)
    issuer.publish(one=RSA)
    known = await tokens(jwt_jwks_url=issuer.url)
    assert await known.caller(signed(RSA, "RS256", "one"))
    issuer.publish(two=OTHER_RSA)
    assert await known.caller(signed(OTHER_RSA, "RS256", "two"))
    with pytest.raises(UnauthenticatedError):
        await known.caller(signed(RSA, "RS256", "one", sub="bob"))


async def test_unusable_keys_in_a_key_set_are_ignored(issuer: Issuer) -> None:
    issuer.publish(one=RSA, two=EC)
    issuer.keys[1] |= {"x": "AAAA", "y": "AAAA"}
    issuer.keys.insert(0, {**issuer.keys[0], "n": "Ag", "e": "Ag", "kid": "none"})
    assert await (await tokens(jwt_jwks_url=issuer.url)).caller(signed(RSA, "RS256", "one"))
    secret = base64.urlsafe_b64encode(SECRET.encode()).decode().rstrip("=")
    issuer.keys = [{"kty": "oct", "k": secret, "kid": "one"}, {"kty": "RSA"}, "x", {"use": "enc"}]  # type: ignore[list-item]
    with pytest.raises(UnauthenticatedError):
        await (await tokens(jwt_jwks_url=issuer.url)).caller(signed(SECRET, "HS256", "one"))
    with pytest.raises(UnauthenticatedError):
        await (await tokens(jwt_jwks_url=issuer.url)).caller(signed(RSA, "RS256", "one"))


async def test_while_the_issuer_is_down_known_keys_are_good(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer.publish(one=RSA)
    known, late = await tokens(jwt_jwks_url=issuer.url), await tokens(jwt_jwks_url=issuer.url)
    assert await known.caller(signed(RSA, "RS256", "one"))
    issuer.broken = True
    monkeypatch.setattr(jwks, "AGAIN", 0.0)
    monkeypatch.setattr(jwks, "FRESH", 0.0)
    assert await known.caller(signed(RSA, "RS256", "one", sub="bob"))
    for issuer.broken, issuer.rude in ((True, False), (False, True)):
        with pytest.raises(UnavailableError, match="cannot be had"):
            await late.caller(signed(RSA, "RS256", "one"))


async def test_a_known_key_does_not_wait_for_its_issuer(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = Tasks()
    issuer.publish(one=RSA)
    known = await tokens(tasks, jwt_jwks_url=issuer.url)
    assert await known.caller(signed(RSA, "RS256", "one"))
    monkeypatch.setattr(jwks, "AGAIN", 0.0)
    monkeypatch.setattr(jwks, "FRESH", 0.0)
    issuer.answers.clear()
    for name in ("ann", "bob"):
        async with asyncio.timeout(2):
            assert await known.caller(signed(RSA, "RS256", "one", sub=name))
    assert len(tasks) == 1  # reads the key set again
    issuer.answers.set()
    await tasks.settle(10)
    assert len(tasks) == 0 and issuer.asked == 2
