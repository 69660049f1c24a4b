"""uvicorn, made patient with the right things: limits on what a peer may hold without getting
anywhere, and a stop that first drains.

    serve ── signal handlers → listen → on_ready → uvicorn's loop
     └─ on SIGTERM or SIGINT: _drain (once; a second signal cuts at once)
         on_drain, gate.close → gate.idle or drain_timeout → gate.cut → uvicorn's own shutdown
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from capsule.config import Config
from capsule.edge.drain import ABORT, Gate
from capsule.edge.errors import http_body
from capsule.edge.joined import Joined
from capsule.edge.ports.room import TAKE_MESSAGES
from capsule.errors import InvalidError

log = logging.getLogger("capsule.edge")

HEADER_PATIENCE = 20.0  # from the first byte (or the connection) to the end of a request's headers
WRITE_PATIENCE = 50.0  # a peer that takes nothing of what we send for this long is gone
CUT_PATIENCE = 2.0  # for what was sent before its connection is cut
PROBES = (20, 10, 3)  # the kernel asks a silent peer after so long, then again, so many times
MAX_HEADERS = 64 * 1024
# Longer than clients keep theirs (and E2B's load balancers: 600 seconds): they close first, and no
# request is lost. Too many that wait are closed sooner, see `Idle`.
KEEP_ALIVE = 640
MOST_IDLE = 4096
MOST_FILES = 65536
BACKLOG = 2048  # a client opens 200 connections at once, and asyncio takes them one after the other
MAX_MESSAGE = 1024 * 1024  # of a WebSocket


class Timer:
    """A deadline that is armed and disarmed for every request."""

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self._seconds = seconds
        self._action = action
        self._handle: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._action)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Idle:
    """Connections that wait for their next request. Of too many, the one that has waited longest
    is closed: they hold files that others need.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[HttpConnection, None] = {}

    def add(self, connection: HttpConnection) -> None:
        self._waiting[connection] = None
        if len(self._waiting) > self._most:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.transport.close()

    def remove(self, connection: HttpConnection) -> None:
        self._waiting.pop(connection, None)


class HttpConfig(uvicorn.Config):
    idle: Idle


class HttpConnection(HttpToolsProtocol):
    config: HttpConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Joined(transport))  # type: ignore[arg-type]  # as one, in all it uses
        _keep_probing(transport)
        self._header_size = 0
        self._in_headers = False
        self._headers_due = Timer(HEADER_PATIENCE, transport.close)
        self._write_due = Timer(WRITE_PATIENCE, transport.abort)
        self._headers_due.arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_due.disarm()
        self._write_due.disarm()
        self.config.idle.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle is not None:
            if self.cycle.response_complete:  # nothing was sent ahead
                self.config.idle.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():  # mostly they come all at once
            self._headers_due.arm()

    def on_message_begin(self) -> None:
        self.config.idle.remove(self)
        self._header_size = 0
        self._in_headers = True
        super().on_message_begin()
        self.scope[ABORT] = self._cut  # type: ignore[literal-required]

    async def _cut(self) -> None:
        """What was sent before leaves before, so far as the client takes it."""
        try:
            await asyncio.sleep(0)  # a head that waits for its body is on its way then
            if not self.transport.is_closing():
                self.transport.set_write_buffer_limits(high=0)
                async with asyncio.timeout(CUT_PATIENCE):
                    await self.flow.drain()
        except TimeoutError:
            pass
        finally:
            self.transport.abort()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._in_headers:  # trailers are none: a request is judged by what it begins with
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._headers_due.disarm()
        if self.parser.should_upgrade() and self._should_upgrade() and self._has_body():
            raise ValueError("a WebSocket begins without a body")  # answered with a 400
        super().on_headers_complete()

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" 0"))
            for name, value in self.headers
        )

    def _count(self, size: int) -> None:
        self._header_size += size
        if self._header_size > MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} bytes of headers")  # answered with a 400

    def pause_writing(self) -> None:
        self._write_due.arm()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_due.disarm()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        _refuse(self.transport, "not a valid HTTP request, or its headers are too long")


def _refuse(transport: asyncio.Transport, problem: str) -> None:
    body = http_body(InvalidError(problem))
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    transport.close()


class SocketConnection(WebSocketsSansIOProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._write_due = Timer(WRITE_PATIENCE, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # uvicorn waits for a request that will never come.
        if not self.handshake_initiated and self.conn.handshake_exc is not None:
            self.handshake_initiated = self.handshake_complete = self.close_sent = True
            _refuse(
                self.transport, "not a valid request for a WebSocket, or its headers are too long"
            )

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope[TAKE_MESSAGES] = self._take_messages  # type: ignore[literal-required]

    def _take_messages(self, size: int) -> None:
        self.conn.max_message_size = self.conn.max_fragment_size = size

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            # A refusal is a complete handshake too; uvicorn would log it as a broken one.
            self.handshake_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._write_due.disarm()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._write_due.arm()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_due.disarm()
        super().resume_writing()


def files_for_us() -> int:
    """How many files this process may have open: as many as it is let, which is often more than it
    begins with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def _keep_probing(transport: asyncio.Transport) -> None:
    """The kernel finds out about peers that vanished without a word."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    after, again, times = PROBES
    for option, value in (
        (socket.TCP_KEEPIDLE, after),
        (socket.TCP_KEEPINTVL, again),
        (socket.TCP_KEEPCNT, times),
        # the same for data it never acknowledges
        (socket.TCP_USER_TIMEOUT, (after + again * times) * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Server(uvicorn.Server):
    """`on_ready` is called when it listens and can be stopped; `on_drain` when it begins to stop,
    with the seconds that this may take, and again when somebody is in a hurry.
    """

    config: HttpConfig

    def __init__(
        self,
        config: Config,
        app: Any,
        gate: Gate,
        *,
        on_drain: Callable[[float], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        http = HttpConfig(
            app,
            http=HttpConnection,
            ws=SocketConnection,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=2,
            ws_max_size=MAX_MESSAGE,
            ws_ping_interval=20,
            # No pong comes while we do not read, and we do not while a program takes no input.
            ws_ping_timeout=None,
            ws_per_message_deflate=False,
        )
        http.idle = Idle(min(MOST_IDLE, files_for_us() // 4))
        super().__init__(http)
        self._gate = gate
        self._on_drain = on_drain
        self._on_ready = on_ready
        self._drain_timeout = config.drain_timeout
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end: a graceful stop would not exit with 0.
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ValueError, RuntimeError):  # not the main thread
                    loop.add_signal_handler(number, self.stop)
                    stack.callback(loop.remove_signal_handler, number)
            yield

    def stop(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._on_drain(0.0)
            self._finish()

    async def _drain(self) -> None:
        log.info("stopping: waiting up to %g s for what runs", self._drain_timeout)
        self._on_drain(self._drain_timeout)
        self._gate.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gate.idle(), self._drain_timeout)
        self._finish()

    def _finish(self) -> None:
        if cut := self._gate.cut():
            log.warning("stopping: cut %d requests that did not end in time", cut)
        self.should_exit = True
