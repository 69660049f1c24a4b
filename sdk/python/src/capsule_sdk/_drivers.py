"""The two ways to carry out a flow's steps. Everything else in this package exists once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
)
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx

from ._flow import Answer, Body, Call, Emit, Flow, Handle, Open, Pump, Read, Sleep, Work
from ._http import AsyncLines, Lines
from ._target import CONNECT_TIMEOUT, KEEPALIVE, Target, patience
from .errors import InvalidError, WrongStateError

T = TypeVar("T")

CHUNK = 256 * 1024
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0)


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
            verify=target.certificates(), limits=_LIMITS, socket_options=KEEPALIVE
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
            verify=target.certificates(), limits=_LIMITS, socket_options=KEEPALIVE
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
