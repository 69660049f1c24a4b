"""An agent that follows a script: for tests of what the real one never does.

async def script(peer: Peer) -> None:
    await peer.reply({"id": "e1", "pid": 7})
    await peer.data(1, b"half of it")   # … and hangs up before the exit

async with ScriptedAgent(script) as agent:
    await agent.link().collect(request)
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from capsule.errors import UnavailableError
from capsule.link.link import AgentLink
from capsule.link.protocol import VERSION, Decoder, Frame, FrameType, dump, load, pack
from capsule.link.unix import UnixStream, connect_unix

Script = Callable[["Peer"], Awaitable[None]]

EXITED = {
    "reason": "exited",
    "exit_code": 0,
    "signal": 0,
    "duration_ms": 1.5,
    "cpu_ms": 1.0,
    "max_rss_bytes": 1_000_000,
    "stdout_bytes": 0,
    "stderr_bytes": 0,
    "stdout_truncated": False,
    "stderr_truncated": False,
}


class Peer:
    """The agent's side of one connection. When the script returns, it hangs up."""

    def __init__(self, stream: UnixStream) -> None:
        self._stream = stream
        self._decoder = Decoder()
        self.request: dict[str, Any] = {}

    async def frame(self) -> Frame | None:
        """The next frame from the host; None when it has gone."""
        while (frame := self._decoder.pop()) is None:
            data = await self._stream.receive()
            if not data:
                return None
            self._decoder.push(data)
        return frame

    async def raw(self, data: bytes) -> None:
        await self._stream.send(data)

    async def send(self, type: FrameType, body: Any = None, **header: int) -> None:
        payload = body if isinstance(body, bytes) else b"" if body is None else dump(body)
        await self.raw(pack(type, payload, **header))

    async def hello(self) -> None:
        await self.send(FrameType.HELLO, {"version": VERSION})

    async def reply(self, body: dict[str, Any]) -> None:
        await self.send(FrameType.REPLY, body)

    async def event(self, body: dict[str, Any]) -> None:
        await self.send(FrameType.EVENT, body)

    async def error(self, code: str, **fields: Any) -> None:
        body = {"code": code, "message": f"scripted {code}", "stage": "", "errno": 0, **fields}
        await self.send(FrameType.ERROR, body)

    async def data(self, stream: int, data: bytes, offset: int = 0) -> None:
        await self.send(FrameType.DATA, data, stream=stream, offset=offset)

    async def exit(self, **fields: Any) -> None:
        await self.send(FrameType.EXIT, {**EXITED, **fields})

    async def gone(self) -> None:
        """Returns when the host has left."""
        while await self.frame() is not None:
            pass

    async def begin(self) -> None:
        await self._expect(FrameType.HELLO)
        self.request = load((await self._expect(FrameType.REQUEST)).payload)

    async def _expect(self, type: FrameType) -> Frame:
        frame = await self.frame()
        if frame is None or frame.type is not type:
            raise UnavailableError(f"the host did not send {type.name}")
        return frame


class ScriptedAgent:
    """Listens on a socket of its own; every connection runs the script. Answers `ping` by itself.

    Tasks: one per connection, in `_live`; `async with` ends them all.
    """

    def __init__(self, script: Script, *, greet: bool = True, answer_ping: bool = True) -> None:
        self._script = script
        self._greet = greet
        self._answer_ping = answer_ping
        self._live: dict[asyncio.Task[None], UnixStream] = {}
        # An abstract address: no file that could be left behind.
        self.path = f"\0capsule-scripted-{os.getpid()}-{id(self):x}"
        self.requests: list[dict[str, Any]] = []
        self.failures: list[Exception] = []

    @property
    def open_connections(self) -> int:
        return len(self._live)

    async def connect(self) -> UnixStream:
        return await connect_unix(self.path)

    def link(self, **options: float) -> AgentLink:
        return AgentLink(self.connect, **options)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        stream = UnixStream(sock, asyncio.get_running_loop())
        task = asyncio.create_task(self._serve(stream))
        self._live[task] = stream
        task.add_done_callback(lambda task: self._live.pop(task).close())

    async def _serve(self, stream: UnixStream) -> None:
        try:
            await self._converse(Peer(stream))
        except UnavailableError:
            pass  # the host hung up in the middle, as some tests want
        except Exception as exc:
            self.failures.append(exc)

    async def _converse(self, peer: Peer) -> None:
        if self._greet:
            await peer.hello()
        await peer.begin()
        self.requests.append(peer.request)
        if self._answer_ping and peer.request["op"] == "ping":
            await peer.reply({"id": "scripted", "version": VERSION, "pid": 1})
        else:
            await self._script(peer)

    async def __aenter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(self.path)
        self._listener.listen(64)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        tasks = list(self._live)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self.failures and exc is None:
            raise self.failures[0]
