"""The server that a client speaks to: where it is, how to get there, and what can go wrong."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

from ._flow import Call
from ._http import Origin, encode
from .errors import UnavailableError

CONNECT_TIMEOUT = 5.0
SILENCE = 60.0  # how long the server may say nothing, where the call does not know better

# A peer that vanished without a word (power cut, cable) is noticed within about a minute.
KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how to speak to it."""

    url: str
    headers: Mapping[str, str]
    retries: int
    host: str  # as the header names it
    prefix: str  # of every path
    shown: str  # the URL as messages show it: without a password

    @classmethod
    def at(cls, url: str, headers: Mapping[str, str], retries: int) -> Target:
        parsed = httpx.URL(url)
        host, prefix = parsed.netloc.decode("ascii"), parsed.raw_path.decode("ascii").rstrip("/")
        shown = url if not parsed.userinfo else str(parsed.copy_with(username="", password=""))
        return cls(url, headers, retries, host, prefix, shown)

    @property
    def is_local(self) -> bool:
        """A proxy named by the environment can never reach this machine's own loopback."""
        return _is_local(httpx.URL(self.url).host)

    def httpx_options(self) -> dict[str, Any]:
        return {"trust_env": not self.is_local, "follow_redirects": False}

    def request(self, call: Call, content: Any) -> httpx.Request:
        waits = {"connect": CONNECT_TIMEOUT, "pool": None, "write": SILENCE}
        waits["read"] = patience(call)
        return httpx.Request(
            call.method,
            self.url + call.path,
            headers={**self.headers, **call.headers},
            content=content,
            extensions={"timeout": waits},
        )

    def direct(self) -> Origin | None:
        """Where to connect to without httpx; None where TLS, a proxy or a login is in between."""
        url = httpx.URL(self.url)
        if url.scheme != "http" or url.userinfo:
            return None
        if not self.is_local and "http" in getproxies() and not proxy_bypass(url.host):
            return None
        return Origin(url.host, url.port or 80, KEEPALIVE)

    def certificates(self) -> ssl.SSLContext | bool:
        """To trust. None are loaded where nothing is encrypted: that takes 20 ms."""
        return True if self.direct() is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def encode(self, call: Call) -> bytes:
        body = call.body if isinstance(call.body, bytes) else b""
        headers = {"Host": self.host, **self.headers, **call.headers}
        return encode(call.method, self.prefix + call.path, headers, body)

    def problem(self, error: Exception) -> UnavailableError:
        """Foreign exceptions become ours here and nowhere else."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
            return self.unreachable()
        if isinstance(error, httpx.TimeoutException | TimeoutError):
            return UnavailableError(
                f"the Capsule server at {self.shown} did not answer in time",
                hint="it may be overloaded; the call may or may not have taken effect",
            )
        return UnavailableError(
            f"the connection to {self.shown} broke: {error or type(error).__name__}",
            hint="check that the server is still running, then try again",
        )

    def unreachable(self) -> UnavailableError:
        problem = UnavailableError(
            f"cannot reach the Capsule server at {self.shown}",
            hint="start it with `capsule serve`, or set CAPSULE_URL to where it runs",
        )
        problem.sent = False
        return problem


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def patience(call: Call) -> float | None:
    """How long the server may be silent; None: for ever."""
    silence = SILENCE if call.timeout is None else call.timeout
    return None if silence <= 0 else silence
