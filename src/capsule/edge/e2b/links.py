"""Signed links to files: what is signed, and of which sandbox a link is that does not say it.

The signature is a hash with the sandbox's token in it, so to find the sandbox is to try them all.
Those whose links were used last are tried first, which is all that most links cost. To try the
others is paid for by the address that asks, and given back if the link is good: whoever guesses is
stopped after `TRIES` in a minute, and holds nobody up meanwhile. A try costs the same however long
the link is.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from starlette.requests import Request

from capsule.edge.addresses import group
from capsule.edge.e2b.access import Access, same
from capsule.edge.errors import RateError

TRIES = 100_000  # of a sandbox, a minute, for one address: about a quarter of a second of work
RECENT = 64  # sandboxes
SLICE = 256  # tries until others have their turn
LONGEST = 4096  # bytes of a path: no file has a longer one
MINUTE = 60.0
_SIGNATURE = re.compile(r"(v1_)?[A-Za-z0-9+/]{43}")


class Link(NamedTuple):
    """What is signed of a link to a file, and the signature."""

    path: str
    operation: str  # read, or write
    username: str
    expiration: str | None
    signature: str

    @classmethod
    def of(cls, request: Request) -> Link:
        query = request.query_params
        return cls(
            path=query.get("path", ""),
            operation="read" if request.method in ("GET", "HEAD") else "write",
            username=query.get("username", ""),
            expiration=query.get("signature_expiration"),
            signature=query.get("signature", ""),
        )

    def is_of(self, token: str) -> bool:
        return Signed(self).is_of(token)

    def problem(self, token: str) -> str | None:
        """Why it does not open the sandbox that has this token."""
        if not self.signature:
            return "missing signature query parameter"
        if not self.is_of(token):
            return "invalid signature"
        return self.late()

    def late(self) -> str | None:
        if self.expiration is None or _ahead(self.expiration):
            return None
        return "signature is already expired"


class Signed:
    """A link, hashed as far as it is the same whichever sandbox it is of: E2B's way."""

    def __init__(self, link: Link) -> None:
        self._begun = hashlib.sha256(_raw(f"{link.path}:{link.operation}:{link.username}:"))
        self._end = "" if link.expiration is None else f":{link.expiration}"
        self._signature = link.signature.removeprefix("v1_")

    def is_of(self, token: str) -> bool:
        return same(self.digest(token), self._signature)

    def digest(self, token: str) -> str:
        whole = self._begun.copy()
        whole.update(_raw(token + self._end))
        return base64.b64encode(whole.digest()).decode().rstrip("=")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _ahead(expiration: str) -> bool:
    return expiration.isdecimal() and len(expiration) < 18 and int(expiration) >= time.time()


class Links:
    """`ids` are those of all sandboxes."""

    def __init__(self, access: Access, ids: Callable[[], Sequence[str]]) -> None:
        self._access = access
        self._ids = ids
        self._recent: OrderedDict[str, None] = OrderedDict()  # the last one last
        self._minute = 0
        self._tried: dict[str, int] = {}  # in this minute, by address

    async def owner(self, link: Link, address: str) -> str | None:
        """Whose link it is, if it is good. Raises RateError."""
        if not _SIGNATURE.fullmatch(link.signature) or link.late():
            return None
        if len(_raw(link.path)) > LONGEST:
            return None
        signed = Signed(link)
        recent = [*reversed(self._recent)]
        found = self._first(signed, recent) or await self._search(signed, address)
        if found is not None:
            self._recent[found] = None
            self._recent.move_to_end(found)
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        return found

    async def _search(self, link: Signed, address: str) -> str | None:
        ids, who = self._ids(), group(address)
        minute = self._pay(who, len(ids))
        for begin in range(0, len(ids), SLICE):
            if found := self._first(link, ids[begin : begin + SLICE]):
                self._give_back(who, len(ids), minute)
                return found
            await asyncio.sleep(0)
        return None

    def _first(self, link: Signed, ids: Iterable[str]) -> str | None:
        return next((id for id in ids if link.is_of(self._access.token(id))), None)

    def _pay(self, who: str, tries: int) -> int:
        """In which minute. At least one search in each, however many sandboxes there are.

        Raises RateError.
        """
        minute, into = divmod(time.monotonic(), MINUTE)
        if minute != self._minute:
            self._minute = int(minute)
            self._tried.clear()
        spent = self._tried.get(who, 0)
        if spent and spent + tries > TRIES:
            raise RateError(
                "too many signed links from this address that are of no sandbox",
                retry_after=max(MINUTE - into, 1.0),
                hint="wait a minute, or name the sandbox in the host: 49983-ID.DOMAIN/files?…",
            )
        self._tried[who] = spent + tries
        return self._minute

    def _give_back(self, who: str, tries: int, minute: int) -> None:
        if minute == self._minute:
            self._tried[who] -= tries
