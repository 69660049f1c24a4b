"""An exec over a WebSocket, with its input: `ws://…/v1/sandboxes/{id}/exec/ws`.

The first message, JSON in text and due within a minute, says what it is about:

    {"type": "start", "cmd": …, …}      as the body of POST …/execs (also `code`, `tty`); stdin
                                        stays open unless "stdin_open" is false
    {"type": "attach", "exec_id": "…", "stdout": 0, "stderr": 0}    go on, from these offsets; with
                                        "input": false only to listen
    both take "frames": "text" (the default) or "binary"

From the server:

    {"type": "started", "exec_id": "…", "pid": 7}
    {"type": "stdout"|"stderr"|"pty", "offset": 0, "data": "…"}     frames: text; whole characters
    1 byte stream (1 stdout, 2 stderr, 3 pty), 8 bytes offset (big-endian), data    frames: binary
    {"type": "gap", "stream": "…", "start": 0, "end": 0}            bytes that are no longer kept
    {"type": "exit", …}                                as in an exec's result; then close 1000
    {"type": "error", "code": "…", "message": "…"}     the exec may go on; then a close:
                                                       1001 sandbox or exec are over, 1008 a mistake
                                                       of the client's, 1013 full: try later, 1011 a
                                                       fault of ours

To the server: binary messages are input; `{"type": "input", "data": "…"}` is input as text,
`{"type": "eof"}` its end, `{"type": "signal", "signal": "INT"}`,
`{"type": "resize", "rows": 40, "cols": 120}`.

A client that leaves, or is cut off, ends nothing: it attaches again from the offset behind the
last data it got.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Literal

import msgspec
from starlette.types import Receive, Scope, Send

from capsule.edge import shapes as s
from capsule.edge.errors import told, understand
from capsule.edge.follow import Chunk, Event, Follower
from capsule.edge.sockets import (
    RESTART,
    RESTART_REASON,
    Inbox,
    Left,
    Socket,
    guarded,
    race,
    refuse,
)
from capsule.edge.verbs import Verbs
from capsule.edge.views import GapView, StartedView
from capsule.errors import InvalidError, WrongStateError
from capsule.model import Stream
from capsule.service import LiveExec

PATIENCE = 60.0  # for the first message

Frames = Literal["text", "binary"]
_HEAD = struct.Struct(">BQ")
_NUMBERS = {Stream.STDOUT: 1, Stream.STDERR: 2, Stream.PTY: 3}


class StartMessage(s.Start, kw_only=True, frozen=True, tag="start"):
    stdin_open: bool = True
    frames: Frames = "text"


class AttachMessage(s.OfExec, kw_only=True, frozen=True, tag="attach"):
    stdout: s.Offset = 0
    stderr: s.Offset = 0
    input: bool = True
    frames: Frames = "text"


class InputMessage(s.Shape, kw_only=True, frozen=True, tag="input"):
    data: str


class EofMessage(s.Shape, kw_only=True, frozen=True, tag="eof"):
    pass


class SignalMessage(s.Shape, kw_only=True, frozen=True, tag="signal"):
    signal: s.SignalName


class ResizeMessage(s.Shape, kw_only=True, frozen=True, tag="resize"):
    rows: s.Side
    cols: s.Side


First = StartMessage | AttachMessage
Later = InputMessage | EofMessage | SignalMessage | ResizeMessage
_FIRST: msgspec.json.Decoder[First] = msgspec.json.Decoder(First)
_LATER: msgspec.json.Decoder[Later] = msgspec.json.Decoder(Later)


class ExecSocketEndpoint:
    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await guarded(Socket(scope, receive, send), self._serve)

    async def _serve(self, socket: Socket) -> None:
        id = socket.scope["path_params"]["id"]
        self._verbs.service.get(id)  # an unknown sandbox is a 404 before the handshake
        await socket.accept()
        try:
            await self._talk(socket, id)
        except Left:
            raise
        except Exception as error:  # the edge: a close has room for a few words, a message for all
            known = understand(error)
            await socket.tell("error", told(known))
            await refuse(socket, known)

    async def _talk(self, socket: Socket, id: str) -> None:
        first = await self._first(socket)
        if first is None:
            await socket.close(RESTART, RESTART_REASON)
            return
        async with await self._open(id, first) as stream:
            await socket.tell("started", StartedView(exec_id=stream.exec_id, pid=stream.pid))
            await self._converse(socket, stream, first)

    async def _first(self, socket: Socket) -> First | None:
        """None: the server stops, and nothing has begun that it should wait for."""
        message: str | bytes = b""

        async def take() -> None:
            nonlocal message
            try:
                async with asyncio.timeout(PATIENCE):
                    message = await socket.receive()
            except TimeoutError:
                text = f"no first message within {PATIENCE:g} seconds"
                raise InvalidError(text, hint="say what to start or attach to") from None

        if await race(take(), self._verbs.gate.closing.wait()) == 1:
            return None
        if isinstance(message, bytes):
            raise InvalidError(
                "the first message is binary, must be text", hint="say what to start or attach to"
            )
        return s.parse(_FIRST, message.encode())

    async def _open(self, id: str, first: First) -> LiveExec:
        if isinstance(first, StartMessage):
            return await self._verbs.open(id, first)
        return await self._verbs.service.attach(
            id, first.exec_id, stdout=first.stdout, stderr=first.stderr, input=first.input
        )

    async def _converse(self, socket: Socket, stream: LiveExec, first: First) -> None:
        stdout, stderr = (
            (first.stdout, first.stderr) if isinstance(first, AttachMessage) else (0, 0)
        )
        text = first.frames == "text"
        follower = Follower(stream, text=text, stdout=stdout, stderr=stderr)
        inbox = Inbox(socket)
        await race(_send_output(socket, follower), _take_input(inbox, stream), inbox.fill())
        await socket.close(1000, f"the program {stream.exit.reason}" if stream.exit else "")


async def _send_output(socket: Socket, follower: Follower) -> None:
    async for event in follower:
        await _send_event(socket, event)


async def _send_event(socket: Socket, event: Event) -> None:
    if isinstance(event, GapView):
        await socket.tell("gap", event)
    elif not isinstance(event, Chunk):
        await socket.tell("exit", event)
    elif isinstance(event.data, bytes):
        await socket.say(_HEAD.pack(_NUMBERS[event.stream], event.offset) + event.data)
    else:
        await socket.tell(event.stream, {"offset": event.offset, "data": event.data})


async def _take_input(inbox: Inbox, stream: LiveExec) -> None:
    """Never ends: after the program's exit, input goes nowhere."""
    async for message in inbox:
        try:
            await _pass_on(stream, message)
        except WrongStateError:
            continue


async def _pass_on(stream: LiveExec, message: str | bytes) -> None:
    if isinstance(message, bytes):
        await stream.send(message)
        return
    match s.parse(_LATER, message.encode()):
        case InputMessage(data=data):
            await stream.send(data.encode())
        case EofMessage():
            await stream.send_eof()
        case SignalMessage(signal=name):
            await stream.signal(name.removeprefix("SIG"))
        case ResizeMessage(rows=rows, cols=cols):
            await stream.resize(rows, cols)
