"""Something between a server and its Engine that can do everything wrong that a daemon can.

    Proxy ── a task for each connection ─┬─ _up     what the server sends
                                         ├─ _read   what the Engine answers, and when
                                         └─ _down   the same, as the server gets it

All of them end with `refuse`.
"""

from __future__ import annotations

import asyncio
import re
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Self

CHUNK = 65536
_REQUEST = re.compile(rb"[A-Z]+ /")  # what else comes is of a stream that the Engine lent out


class Mode(StrEnum):
    PASS = "passes everything on"
    HANG = "accepts, and never answers"
    ERROR = "answers 500"
    CUT = "hangs up in the middle of an answer"


class Proxy:
    """`held` is a pattern: requests that begin with it wait for `release`, and are carried out
    then, whether anybody still waits or not."""

    def __init__(self, path: Path, engine: Path) -> None:
        self.path = path
        self.engine = engine
        self.url = f"unix://{path}"
        self.mode = Mode.PASS
        self.changed = asyncio.Event()  # from one mode to another
        self.held: str | None = None
        self.holding = 0  # how many
        self.carried_out = 0  # of them
        self.released = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, str(self.path), backlog=256)

    async def refuse(self) -> None:
        """As if the daemon were gone: nobody listens, and what was connected is cut off."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def set(self, mode: Mode) -> None:
        """For what comes from now on, also over connections that there are."""
        self.mode = mode
        self.changed.set()
        self.changed = asyncio.Event()

    def release(self) -> None:
        self.released.set()

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            engine = await asyncio.open_unix_connection(str(self.engine))
            await _Connection(self, reader, writer, *engine).run()
        except (asyncio.CancelledError, OSError):
            pass  # asyncio's own server would report it
        finally:
            self._connections.discard(task)
            writer.close()


class _Over(Exception):
    """This connection is."""


class _Connection:
    def __init__(
        self,
        proxy: Proxy,
        client_reader: StreamReader,
        client: StreamWriter,
        engine_reader: StreamReader,
        engine: StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._client_reader, self._client = client_reader, client
        self._engine_reader, self._engine = engine_reader, engine
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._was_held = False

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._up())
                tasks.create_task(self._down())
                tasks.create_task(self._read())
        except* (_Over, OSError):
            pass
        finally:
            self._engine.close()

    async def _up(self) -> None:
        proxy = self._proxy
        while data := await self._client_reader.read(CHUNK):
            await self._unless_it_hangs()
            if proxy.mode is Mode.ERROR and _REQUEST.match(data):
                await self._fail(data)
            if proxy.held is not None and re.match(proxy.held.encode(), data):
                proxy.holding += 1
                self._was_held = True
                await proxy.released.wait()
            self._engine.write(data)
            await self._engine.drain()
        if not self._was_held:
            raise _Over

    async def _fail(self, request: bytes) -> None:
        """Takes the rest of the request, and answers."""
        while b"\r\n\r\n" not in request:
            request += await self._client_reader.read(CHUNK)
        head, _, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        while length is not None and len(body) < int(length[1]):
            body += await self._client_reader.read(CHUNK)
        answer = b'{"message": "the database is on fire"}'
        self._client.write(
            b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer)
        )
        with suppress(OSError):
            await self._client.drain()
        raise _Over

    async def _read(self) -> None:
        data = b"."
        while data:
            data = await self._engine_reader.read(CHUNK)
            self._proxy.carried_out += self._was_held
            self._arrived.put_nowait(data)

    async def _down(self) -> None:
        while True:
            data = await self._arrived.get()
            await self._unless_it_hangs()
            if self._proxy.mode is Mode.CUT:
                data = data[: len(data) // 2]
            self._client.write(data)
            await self._client.drain()
            if not data or self._proxy.mode is Mode.CUT:
                raise _Over

    async def _unless_it_hangs(self) -> None:
        while self._proxy.mode is Mode.HANG:
            await self._proxy.changed.wait()
