"""The two ways to carry out a flow's steps. Everything else in this package exists once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import stat
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Mapping,
)
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx

from ._flow import Answer, Body, Call, Emit, Flow, Handle, Open, Pump, Read, Sleep, Work
from ._http import AsyncLines, Lines, Origin, encode
from .errors import InvalidError, UnavailableError, WrongStateError

T = TypeVar("T")

CHUNK = 256 * 1024
CONNECT_TIMEOUT = 5.0
SILENCE = 60.0  # how long the server may say nothing, where the call does not know better

# A peer that vanished without a word (power cut, cable) is noticed within about a minute.
_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0)


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
        return Origin(url.host, url.port or 80, _KEEPALIVE)

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


def chunks(body: Path | IO[bytes] | Iterable[bytes]) -> Generator[bytes, None, None]:
    """What is sent, in pieces that are not empty."""
    if isinstance(body, Path):
        with body.open("rb") as file:
            yield from chunks(file)
        return
    pieces = iter(lambda: body.read(CHUNK), b"") if hasattr(body, "read") else iter(body)
    for piece in pieces:
        if isinstance(piece, str):
            raise InvalidError(
                "the content comes as text, not bytes", hint="open files with mode 'rb'"
            )
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise InvalidError(f"the content comes as {type(piece).__name__}, not bytes")
        if piece:
            yield bytes(piece)


async def _async_chunks(body: Path | IO[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    source = chunks(body)
    try:
        while chunk := await asyncio.to_thread(next, source, b""):
            yield chunk
    finally:
        with contextlib.suppress(ValueError):  # cancelled: a thread is still reading from it
            await asyncio.to_thread(source.close)


def _with_length(call: Call) -> Call:
    """Tell the size of a file up front, so that the server can refuse it before it is sent."""
    if isinstance(call.body, Path) and (size := known_size(call.body)):
        headers = {**call.headers, "Content-Length": str(size)}
        return Call(call.method, call.path, call.body, headers, call.timeout)
    return call


def known_size(path: Path) -> int | None:
    """Of a regular file; None where the content decides: a pipe, a file of /proc."""
    found = os.stat(path)
    return found.st_size or None if stat.S_ISREG(found.st_mode) else None


def _is_plain(body: Body | None) -> bool:
    return body is None or isinstance(body, bytes)


def _closed() -> WrongStateError:
    return WrongStateError("the client is closed", hint="make a new one, or close it later")


def _close_both(http: httpx.Client, lines: Lines | None) -> None:
    http.close()
    if lines is not None:
        lines.close()


class SyncDriver:
    def __init__(self, target: Target) -> None:
        self.target = target
        transport = httpx.HTTPTransport(
            verify=target.certificates(), limits=_LIMITS, socket_options=_KEEPALIVE
        )
        self._http = httpx.Client(transport=transport, **target.httpx_options())
        origin = target.direct()
        self._lines = Lines(origin) if origin else None
        # Few scripts close their client; its idle connections should not outlive it.
        self._closing = weakref.finalize(self, _close_both, self._http, self._lines)

    def close(self) -> None:
        self._closing()

    def run(self, flow: Flow[T]) -> T:
        pump = Pump(flow)
        with contextlib.ExitStack() as opened, contextlib.closing(flow):
            while (step := pump.next()) is not None:
                with pump:
                    pump.reply = self._do(step, opened)
        return pump.result

    def iterate(self, flow: Flow[None]) -> Generator[Any, None, None]:
        pump = Pump(flow)
        with contextlib.ExitStack() as opened, contextlib.closing(flow):
            while (step := pump.next()) is not None:
                if isinstance(step, Emit):
                    yield step.value
                    continue
                with pump:
                    pump.reply = self._do(step, opened)

    def _do(self, step: Any, opened: contextlib.ExitStack) -> Any:
        if not self._closing.alive:
            raise _closed()
        match step:
            case Call():
                return self._call(step)
            case Open():
                opened.close()  # a flow reads one response at a time
                return self._open(step.call, opened)
            case Read():
                return self._read(step.handle)
            case Sleep():
                return time.sleep(step.seconds)
            case Work():
                return step.do()
        raise TypeError(f"unknown step: {step!r}")

    def _send(self, call: Call, *, stream: bool) -> httpx.Response:
        if not _is_plain(call.body):
            call = _with_length(call)
        content = call.body if _is_plain(call.body) else chunks(call.body)  # type: ignore[arg-type]
        try:
            return self._http.send(self.target.request(call, content), stream=stream)
        except httpx.HTTPError as error:
            raise self.target.problem(error) from error

    def _call(self, call: Call) -> Answer:
        if self._lines is not None and _is_plain(call.body):
            return self._exchange(self._lines, call)
        response = self._send(call, stream=False)
        return Answer(response.status_code, response.headers, response.content)

    def _exchange(self, lines: Lines, call: Call) -> Answer:
        request = self.target.encode(call)
        try:
            line = lines.take(CONNECT_TIMEOUT)
        except OSError as error:
            raise self.target.unreachable() from error
        try:
            return lines.exchange(line, request, patience(call))
        except OSError as error:
            raise self.target.problem(error) from error

    def _open(self, call: Call, opened: contextlib.ExitStack) -> Handle:
        response = self._send(call, stream=True)
        opened.callback(response.close)
        return Handle(response.status_code, response.headers, response.iter_raw())

    def _read(self, handle: Handle) -> bytes:
        try:
            return next(handle.pieces, b"")
        except httpx.HTTPError as error:
            raise self.target.problem(error) from error


async def _in_thread(do: Callable[[], T]) -> T:
    """A thread cannot be called back: whoever is cancelled cleans up only when it has ended."""
    task = asyncio.ensure_future(asyncio.to_thread(do))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen: it does not matter any more
        raise


class AsyncDriver:
    def __init__(self, target: Target) -> None:
        self.target = target
        transport = httpx.AsyncHTTPTransport(
            verify=target.certificates(), limits=_LIMITS, socket_options=_KEEPALIVE
        )
        self._http = httpx.AsyncClient(transport=transport, **target.httpx_options())
        origin = target.direct()
        self._lines = AsyncLines(origin) if origin else None

    async def aclose(self) -> None:
        """Closing twice is fine."""
        await self._http.aclose()
        if self._lines is not None:
            await self._lines.aclose()

    async def run(self, flow: Flow[T]) -> T:
        pump = Pump(flow)
        async with contextlib.AsyncExitStack() as opened:
            with contextlib.closing(flow):
                while (step := pump.next()) is not None:
                    with pump:
                        pump.reply = await self._do(step, opened)
        return pump.result

    async def iterate(self, flow: Flow[None]) -> AsyncGenerator[Any, None]:
        pump = Pump(flow)
        async with contextlib.AsyncExitStack() as opened:
            with contextlib.closing(flow):
                while (step := pump.next()) is not None:
                    if isinstance(step, Emit):
                        yield step.value
                        continue
                    with pump:
                        pump.reply = await self._do(step, opened)

    async def _do(self, step: Any, opened: contextlib.AsyncExitStack) -> Any:
        if self._http.is_closed:
            raise _closed()
        match step:
            case Call():
                return await self._call(step)
            case Open():
                await opened.aclose()
                return await self._open(step.call, opened)
            case Read():
                return await self._read(step.handle)
            case Sleep():
                return await asyncio.sleep(step.seconds)
            case Work():
                return await _in_thread(step.do)
        raise TypeError(f"unknown step: {step!r}")

    async def _send(self, call: Call, *, stream: bool) -> httpx.Response:
        if not _is_plain(call.body):
            call = await asyncio.to_thread(_with_length, call)
        content = call.body if _is_plain(call.body) else _async_chunks(call.body)  # type: ignore[arg-type]
        try:
            return await self._http.send(self.target.request(call, content), stream=stream)
        except httpx.HTTPError as error:
            raise self.target.problem(error) from error

    async def _call(self, call: Call) -> Answer:
        if self._lines is not None and _is_plain(call.body):
            return await self._exchange(self._lines, call)
        response = await self._send(call, stream=False)
        return Answer(response.status_code, response.headers, response.content)

    async def _exchange(self, lines: AsyncLines, call: Call) -> Answer:
        request = self.target.encode(call)
        try:
            line = await lines.take(CONNECT_TIMEOUT)
        except OSError as error:
            raise self.target.unreachable() from error
        try:
            return await lines.exchange(line, request, patience(call))
        except OSError as error:
            raise self.target.problem(error) from error

    async def _open(self, call: Call, opened: contextlib.AsyncExitStack) -> Handle:
        response = await self._send(call, stream=True)
        opened.push_async_callback(response.aclose)
        return Handle(response.status_code, response.headers, response.aiter_raw())

    async def _read(self, handle: Handle) -> bytes:
        try:
            return await anext(handle.pieces, b"")
        except httpx.HTTPError as error:
            raise self.target.problem(error) from error
