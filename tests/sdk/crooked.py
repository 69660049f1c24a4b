"""An HTTP server that misbehaves on purpose, one request after the other, as a test tells it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Deed = Callable[[socket.socket, Request], bool]  # True: the connection stays open


@dataclass(slots=True)
class CrookedServer:
    url: str
    deeds: list[Deed]
    requests: list[Request] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)


@contextlib.contextmanager
def crooked_server(*deeds: Deed) -> Iterator[CrookedServer]:
    """Each request gets the next deed, whichever connection it comes on; then there are none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = CrookedServer(f"http://127.0.0.1:{listener.getsockname()[1]}", list(deeds))
        server.threads.append(threading.Thread(target=_accept, args=(listener, server)))
        server.threads[0].start()
        try:
            yield server
        finally:
            for each in (listener, *server.connections):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in server.threads:
                thread.join(5)


def _accept(listener: socket.socket, server: CrookedServer) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        server.connections.append(connection)
        server.threads.append(threading.Thread(target=_serve, args=(connection, server)))
        server.threads[-1].start()


def _serve(connection: socket.socket, server: CrookedServer) -> None:
    with connection, contextlib.suppress(OSError):
        while (request := _read(connection)) is not None:
            server.requests.append(request)
            if not server.deeds or not server.deeds.pop(0)(connection, request):
                return


def _read(connection: socket.socket) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (piece := connection.recv(65536)):
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    method, path, _ = first.split(" ")
    return Request(method, path, headers, body)


def answer(body: Any, *, status: int = 200, **headers: str) -> Deed:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    def deed(connection: socket.socket, request: Request) -> bool:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        return True

    return deed


def result(value: Any) -> Deed:
    return answer({"jsonrpc": "2.0", "id": 1, "result": value})


def error(code: str, message: str = "no", **more: Any) -> Deed:
    data = {"code": code, "message": message, **more}
    return answer(
        {"jsonrpc": "2.0", "id": 1, "error": {"code": -1, "message": message, "data": data}}
    )


def hang_up(connection: socket.socket, request: Request) -> bool:
    """The request came, an answer never will."""
    return False


def events(*parts: bytes) -> Deed:
    """A stream of events that breaks off after these bytes."""

    def deed(connection: socket.socket, request: Request) -> bool:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        for part in parts:
            connection.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        return False

    return deed
