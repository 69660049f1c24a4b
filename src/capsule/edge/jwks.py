"""An issuer's public keys, from the address where it publishes them (JWKS, RFC 7517).

Read when the first token comes, again every five minutes, and at once for a key that is not among
those known: so a rotation needs nobody's help. Tokens with made-up key ids cause no more than one
reading in ten seconds. While the address does not answer, what was read last stays good for a day,
and whoever has a key that is known waits for nothing.

Tasks, owned by whoever gives `tasks`: one at most, which reads again what is known.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.request
from http.client import HTTPException
from typing import Any

from capsule.errors import UnavailableError
from capsule.service.tasks import Tasks

log = logging.getLogger("capsule.edge")

FRESH = 300.0
STALE = 24 * 3600.0
AGAIN = 10.0
PATIENCE = 5.0
MOST_BYTES = 1024 * 1024


class KeySet:
    def __init__(self, url: str, tasks: Tasks) -> None:
        """`tasks` are ended by their owner."""
        self._url = url
        self._keys: list[dict[str, Any]] = []
        self._read = -STALE - 1  # when; monotonic
        self._tried = -AGAIN - 1
        self._reading = asyncio.Lock()  # many tokens that come at once are one reading
        self._tasks = tasks
        self._aside: asyncio.Task[None] | None = None

    async def keys(self, kind: str, algorithm: str, kid: str | None) -> list[Any]:
        """Those of this kind, or the one that the token names. Raises UnavailableError."""
        found = self._found(kind, algorithm, kid)
        age = time.monotonic() - self._read
        if not found or age > STALE:
            await self._refresh()
            found = self._found(kind, algorithm, kid)
        elif age > FRESH and (self._aside is None or self._aside.done()):
            self._aside = self._tasks.spawn(self._refresh(), "read the issuer's keys")
        if time.monotonic() - self._read > STALE:
            raise UnavailableError(
                "the keys of the tokens' issuer cannot be had", hint="try again in a few seconds"
            )
        return found

    def _found(self, kind: str, algorithm: str, kid: str | None) -> list[Any]:
        return [
            each["key"]
            for each in self._keys
            if each["kty"] == kind and algorithm == each["alg"] and kid in (None, each["kid"])
        ]

    async def _refresh(self) -> None:
        async with self._reading:
            now = time.monotonic()
            if now - self._tried < AGAIN:
                return
            self._tried = now
            try:
                self._keys = await asyncio.to_thread(_fetch, self._url)
                self._read = time.monotonic()
            except (OSError, ValueError, HTTPException) as error:
                log.warning("cannot read the keys at %s: %s", self._url, error)


def _fetch(url: str) -> list[dict[str, Any]]:
    """Blocks. Raises OSError, ValueError, HTTPException."""
    import jwt

    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        body = answer.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    document = json.loads(body)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("no list of keys")
    found: list[dict[str, Any]] = []
    for each in listed:
        if not isinstance(each, dict) or each.get("use", "sig") != "sig":
            continue
        # What a key is for follows from its kind; a shared secret has no place in such a list.
        algorithm = {"RSA": "RS256", "EC": "ES256"}.get(str(each.get("kty")))
        if algorithm is None or each.get("alg", algorithm) != algorithm:
            continue
        try:
            key = jwt.PyJWK.from_dict(each, algorithm=algorithm).key
        except (jwt.PyJWTError, ValueError):
            continue  # of a curve that we do not take, or broken
        found.append({"kid": each.get("kid"), "kty": each["kty"], "alg": algorithm, "key": key})
    return found
