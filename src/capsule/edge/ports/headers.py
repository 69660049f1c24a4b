"""A request's headers on their way into a sandbox, and an answer's on their way out.

What belongs to one connection ends there (hop by hop). What opens Capsule's doors is never shown to
a program. Where a request comes from is told by us, whatever its sender says of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from starlette.types import Scope

Headers = Sequence[tuple[bytes, bytes]]

_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OURS = frozenset({b"x-capsule-tenant"})
_OUR_PREFIXES = (b"e2b-", b"x-forwarded-")
_OF_SENDER = frozenset({b"forwarded", b"x-real-ip", b"host", b"expect"})
_SOCKET = b"sec-websocket-"


class Origin(NamedTuple):
    """Where a request comes from, as the program is told."""

    host: bytes  # what the client wants to reach
    told_host: bytes  # what the program is told
    address: str
    scheme: str


def inwards(scope: Scope, origin: Origin, secret: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """`secret` are further names that are left out: a key was found there."""
    headers: Headers = scope["headers"]
    left_out = _HOP | _OURS | _OF_SENDER | secret | _named(headers)
    kept = [
        (name, value)
        for name, value in headers
        if name not in left_out and not name.startswith((*_OUR_PREFIXES, _SOCKET))
    ]
    return [
        (b"host", origin.told_host),
        *kept,
        (b"x-forwarded-for", origin.address.encode()),
        (b"x-forwarded-host", origin.host),
        (b"x-forwarded-proto", origin.scheme.encode()),
    ]


def outwards(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The date is our server's to write; a length is none where chunks are."""
    found = list(headers)
    left_out = _HOP | _named(found) | {b"date"}
    if any(name.lower() == b"transfer-encoding" for name, _ in found):
        left_out |= {b"content-length"}
    return [
        (name.lower(), value)
        for name, value in found
        if name.lower() not in left_out and not name.lower().startswith(_SOCKET)
    ]


def framing(headers: Headers) -> list[tuple[bytes, bytes]]:
    """How long a request's body is: as it says, in chunks, or none. Raises ValueError when that
    can be read in two ways.
    """
    lengths = {value.strip() for name, value in headers if name == b"content-length"}
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise ValueError("more than one of Content-Length and Transfer-Encoding")
    if codings and codings != [b"chunked"]:
        raise ValueError("a Transfer-Encoding other than chunked")
    if codings:
        return [(b"transfer-encoding", b"chunked")]
    return [(b"content-length", length) for length in lengths]


def _named(headers: Headers) -> frozenset[bytes]:
    """What `Connection` says is for this connection alone. Lengths stay, whatever it says."""
    said = [value for name, value in headers if name.lower() == b"connection"]
    words = (word.strip().lower() for value in said for word in value.split(b","))
    return frozenset(words) - {b"content-length", b"host", b"", b"close"}
