"""Whose address a request comes from, and whether it came by HTTPS. `X-Forwarded-For` and
`X-Forwarded-Proto` say what their sender likes, so they are believed from proxies that the operator
has named; the first only up to an address that is none.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from starlette.types import Scope

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MAX_HOPS = 32
UNKNOWN = "unknown"  # a Unix socket, or nonsense


class Addresses:
    def __init__(self, trusted: Iterable[str]) -> None:
        self._trusted = [ipaddress.ip_network(each, strict=False) for each in trusted]

    def of(self, scope: Scope) -> str:
        peer = _parsed((scope.get("client") or ("",))[0])
        if peer is None or not self._trusted or not self._trusts(peer):
            return UNKNOWN if peer is None else str(peer)
        for hop in reversed(_hops(scope)):
            found = _parsed(hop)
            if found is None:
                break  # what stands before nonsense is worth no more
            peer = found
            if not self._trusts(found):
                break
        return str(peer)

    def over_tls(self, scope: Scope) -> bool:
        """A proxy says so that is believed; what it says stands last."""
        peer = _parsed((scope.get("client") or ("",))[0])
        if peer is None or not self._trusts(peer):
            return False
        said = [value for name, value in scope["headers"] if name == b"x-forwarded-proto"]
        return bool(said) and said[-1].rpartition(b",")[2].strip().lower() == b"https"

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def group(address: str) -> str:
    """Who counts as one: an IPv6 customer has a whole /64."""
    found = _parsed(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address


def _hops(scope: Scope) -> list[str]:
    said = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
    return b",".join(said).decode("latin-1").split(",")[-_MAX_HOPS:]


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Address | None:
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found
