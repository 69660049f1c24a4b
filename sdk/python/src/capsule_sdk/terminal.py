"""A shell in a sandbox over a WebSocket: bytes both ways, resize, and the reason when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from ._arguments import name_as_given, number, whole
from ._flow import Answer
from ._rpc import failure
from .errors import CapsuleError, GoneError, InternalError, UnavailableError
from .values import Exit

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.sync.client import ClientConnection as SyncConnection

    from ._target import Target

_PROTOCOL = Subprotocol("capsule.terminal.v1")  # bytes are data, text messages are JSON
_MAX_MESSAGE = 4 * 1024 * 1024
_PIECE = 64 * 1024
_FOREIGN = (OSError, WebSocketException, ssl.SSLError, TimeoutError)


def _url(target: Target, sandbox_id: str, name: str, rows: int, cols: int) -> str:
    query = urlencode({"session": name, **_size(rows, cols)})
    return f"ws{target.url.removeprefix('http')}/terminal/{sandbox_id}?{query}"


def _options(target: Target) -> dict[str, Any]:
    headers = {k: v for k, v in target.headers.items() if k == "Authorization"}
    return {
        "additional_headers": headers,
        "subprotocols": [_PROTOCOL],
        "user_agent_header": target.headers["User-Agent"],
        "compression": None,  # keystrokes do not shrink, and it costs memory on both sides
        "max_size": _MAX_MESSAGE,
        "open_timeout": 10,
        "proxy": None if target.is_local else True,  # True: the environment's, as for all calls
    }


def _size(rows: int, cols: int) -> dict[str, int]:
    return {"rows": whole("rows", rows, 1, 4096), "cols": whole("cols", cols, 1, 4096)}


def _resize(rows: int, cols: int) -> str:
    return json.dumps({"type": "resize", **_size(rows, cols)})


def _refused(error: Exception, target: Target, name: str) -> CapsuleError:
    if isinstance(error, InvalidStatus):
        response = error.response
        body = bytes(response.body or b"")
        problem = failure(Answer(response.status_code, response.headers, body))
        problem.message = problem.message.removeprefix("query ")  # where we put the arguments
        name_as_given(problem, {"name": name}, {"session": "name"})
        return problem
    return UnavailableError(
        f"cannot open a terminal at {target.shown}: {error or type(error).__name__}",
        hint="start the server with `capsule serve`, or set CAPSULE_URL to where it runs",
    )


def _wait(timeout: float | None) -> float | None:
    """What is left of a deadline may be below zero."""
    if timeout is None:
        return None
    return max(0.0, number("timeout", timeout, "a number of seconds"))


def _pieces(data: str | bytes) -> Iterator[bytes]:
    raw = data.encode() if isinstance(data, str) else data
    for start in range(0, len(raw), _PIECE):
        yield raw[start : start + _PIECE]


class _Ending:
    """How the terminal ended: `reason` is "" while it lasts, `exit` set if the shell ended."""

    reason = ""
    code = 0  # of the WebSocket's close; 1012: the server restarts, the shell goes on
    exit: Exit | None = None

    def _hear(self, message: str | bytes) -> bytes:
        """Output, or b"" for a message about the terminal."""
        if isinstance(message, bytes):
            return message
        try:
            body = json.loads(message)
        except ValueError as error:
            raise InternalError(f"the server sent a message that is no JSON: {error}") from error
        if body.get("type") == "exit":
            self.exit = Exit.from_json(body)
        return b""

    def _over(self, error: ConnectionClosed) -> None:
        close = error.rcvd
        self.code = close.code if close else 1006
        self.reason = (close.reason if close else "") or "the connection was lost"

    def _check(self) -> None:
        if self.reason:
            raise GoneError(f"the terminal is closed: {self.reason}")


class Terminal(_Ending):
    """Iterate or `recv` for output, `send` for input. Closing it leaves the shell running."""

    def __init__(self, connection: SyncConnection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, target: Target, sandbox_id: str, *, name: str, rows: int, cols: int) -> Terminal:
        from websockets.sync.client import connect

        try:
            url = _url(target, sandbox_id, name, rows, cols)
            # Entered here and closed by `close`: a terminal outlives the call that opened it.
            return cls(connect(url, **_options(target)).__enter__())
        except _FOREIGN as error:
            raise _refused(error, target, name) from error

    def send(self, data: str | bytes) -> None:
        """Type this. Raises GoneError when the terminal has ended."""
        for piece in _pieces(data):
            self._write(piece)

    def resize(self, rows: int, cols: int) -> None:
        """Tell the shell this terminal's new size."""
        self._write(_resize(rows, cols))

    def _write(self, message: str | bytes) -> None:
        self._check()
        try:
            self._connection.send(message)
        except ConnectionClosed as error:
            self._over(error)
            self._check()

    def recv(self, timeout: float | None = None) -> bytes:
        """The next output; b"" when the terminal has ended, and `reason` then says why.

        Raises TimeoutError when nothing came in `timeout` seconds.
        """
        wait = _wait(timeout)
        try:
            while True:
                if data := self._hear(self._connection.recv(wait)):
                    return data
        except ConnectionClosed as error:
            self._over(error)
            return b""

    def __iter__(self) -> Iterator[bytes]:
        while data := self.recv():
            yield data

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTerminal(_Ending):
    """Iterate or `recv` for output, `send` for input. Closing it leaves the shell running."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def open(
        cls, target: Target, sandbox_id: str, *, name: str, rows: int, cols: int
    ) -> AsyncTerminal:
        from websockets.asyncio.client import connect

        try:
            url = _url(target, sandbox_id, name, rows, cols)
            return cls(await connect(url, **_options(target)))
        except _FOREIGN as error:
            raise _refused(error, target, name) from error

    async def send(self, data: str | bytes) -> None:
        """Type this. Raises GoneError when the terminal has ended."""
        for piece in _pieces(data):
            await self._write(piece)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell the shell this terminal's new size."""
        await self._write(_resize(rows, cols))

    async def _write(self, message: str | bytes) -> None:
        self._check()
        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            self._over(error)
            self._check()

    async def recv(self, timeout: float | None = None) -> bytes:
        """The next output; b"" when the terminal has ended, and `reason` then says why.

        Raises TimeoutError when nothing came in `timeout` seconds.
        """
        wait = _wait(timeout)
        try:
            while True:
                async with asyncio.timeout(wait):
                    message = await self._connection.recv()
                if data := self._hear(message):
                    return data
        except ConnectionClosed as error:
            self._over(error)
            return b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.recv():
            yield data

    async def aclose(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
