"""Requests to addresses that clients have named.

Such an address must not lead into the operator's own network, or to this machine. A name is looked
up when the connection is made, what it means then is checked, and exactly that is connected to: a
name that means something else a moment later changes nothing. Redirections are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpcore

from capsule.errors import InvalidError

MAX_URL = 2048
MAX_ANSWER = 4096  # of the answer, bytes that are looked at
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class RefusedTargetError(Exception):
    """Its text says why, and is for whoever made the webhook."""


class Told(NamedTuple):
    status: int
    answer: bytes  # its beginning


def check_url(url: str, *, private: bool) -> str:
    """Raises InvalidError for what can be seen to lead nowhere; names are looked up later."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidError(f"url: {error}", field="url") from None
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidError(f"url: at most {MAX_URL} printable ASCII characters", field="url")
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise InvalidError("url: must be http://HOST/… or https://HOST/…", field="url")
    if parts.username is not None or parts.password is not None:
        raise InvalidError("url: must not contain a user or a password", field="url")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return url
    if not private and not is_public(address):
        raise InvalidError(
            f"url: {host} is not a public address",
            hint="the operator may allow others: CAPSULE_WEBHOOK_TARGETS=any",
            field="url",
        )
    return url


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address.teredo is not None:
            return False
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:  # an old word for private
            return False
    # Reserved: among others what translates to IPv4 in networks of one's own (RFC 8215).
    return address.is_global and not address.is_multicast and not address.is_reserved


class Network(httpcore.AsyncNetworkBackend):
    def __init__(self, *, private: bool) -> None:
        self._private = private
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._addresses(host, port)
        failed: Exception | None = None
        for address in addresses[:4]:
            try:
                return await self._backend.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed or RefusedTargetError(f"{host} has no address")

    async def _addresses(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise RefusedTargetError(f"{host} is not known: {error.strerror or error}") from error
        except UnicodeError as error:  # no name can be written like this
            raise RefusedTargetError(f"{host} is no name: {error}") from error
        addresses = [str(each[4][0]) for each in found]
        if not self._private:
            # One that is not public is enough: nobody's own name has both.
            for address in addresses:
                if not is_public(ipaddress.ip_address(address.partition("%")[0])):
                    raise RefusedTargetError(f"{host} is {address}, which is not a public address")
        return addresses

    async def connect_unix_socket(self, *_: object, **__: object) -> httpcore.AsyncNetworkStream:
        raise RefusedTargetError("not a network address")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Outbound:
    def __init__(self, *, private: bool, timeout: float) -> None:
        self._timeout = timeout
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(),
            max_connections=32,
            max_keepalive_connections=0,  # so that every request looks the name up
            network_backend=Network(private=private),
        )

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Told:
        """Raises RefusedTargetError, TimeoutError, and what httpcore raises."""
        async with asyncio.timeout(self._timeout):
            async with self._pool.stream(
                "POST", url, headers=list(headers.items()), content=body
            ) as answer:
                return Told(answer.status, await _beginning(answer))

    async def aclose(self) -> None:
        await self._pool.aclose()


async def _beginning(answer: httpcore.Response) -> bytes:
    found = b""
    async for piece in answer.aiter_stream():
        found += piece
        if len(found) >= MAX_ANSWER:
            break
    return found[:MAX_ANSWER]
