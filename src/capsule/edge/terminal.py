"""Terminals: `ws://…/terminal/{id}` and `ws://…/sandbox/{id}/stream`, a login shell on a real
PTY.

Query: `session=NAME` (default `main`; the same name is the same shell for every viewer, and after
a reconnect), `rows=24&cols=80` (the size to begin with), `encoding=text|binary`.

Without a subprotocol, or with `capsule.terminal.raw`, data is raw both ways: every message to the
server is typed into the terminal as it is, every message from it is output, in text messages of
whole characters, or with `encoding=binary` in binary ones.

With the subprotocol `capsule.terminal.v1` binary messages are data, both ways, and text messages
are JSON:

    client   {"type": "resize", "rows": 40, "cols": 120}
             {"type": "input", "data": "ls\\n"}             for clients that have no bytes at hand
    server   {"type": "opened", "session": "main", "exec_id": "…"}
             {"type": "exit", …}                           as in an exec's result; then the close

A viewer that joins or comes back first gets the recent screen again; one that reads too slowly
misses what was between. Close codes: 1000 the shell ended (the reason says how), 1001 the sandbox
is over, 1008 a message that makes no sense, 1011 the box does not answer, 1012 the server restarts
(come back, the shell goes on), 1013 it takes no more input. An unknown sandbox is a 404 before the
socket opens; a missing key a 401, a foreign origin a 403.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.types import Receive, Scope, Send

from capsule.edge.shapes import Shape, Side, parse
from capsule.edge.sockets import (
    FAULT,
    OVER,
    RESTART,
    RESTART_REASON,
    Inbox,
    Socket,
    guarded,
    query,
    race,
)
from capsule.edge.text import TextCut
from capsule.edge.verbs import Verbs
from capsule.edge.views import ExitView
from capsule.service.terminal import Closing, TerminalSession

FRAMED = "capsule.terminal.v1"
RAW = "capsule.terminal.raw"

CLOSE_CODES = {"exited": 1000, "left": 1000, "gone": OVER, "unavailable": FAULT}


class Query(Shape, kw_only=True, frozen=True):
    session: str = "main"
    rows: Side = 24
    cols: Side = 80
    encoding: Literal["text", "binary"] = "text"


class Resize(Shape, kw_only=True, frozen=True, tag="resize"):
    rows: Side
    cols: Side


class Input(Shape, kw_only=True, frozen=True, tag="input"):
    data: str


_CONTROL: msgspec.json.Decoder[Resize | Input] = msgspec.json.Decoder(Resize | Input)


class TerminalEndpoint:
    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await guarded(Socket(scope, receive, send), self._serve)

    async def _serve(self, socket: Socket) -> None:
        wanted = query(socket.scope, Query)
        gate = self._verbs.gate
        gate.admit()
        session = await self._verbs.service.terminal(
            socket.scope["path_params"]["id"],
            name=wanted.session,
            rows=wanted.rows,
            cols=wanted.cols,
        )
        try:
            viewer = Viewer(socket, session, binary=wanted.encoding == "binary")
            await viewer.open()
            inbox = Inbox(socket)
            ended = await race(
                viewer.output(), gate.closing.wait(), viewer.input(inbox), inbox.fill()
            )
            if ended == 1:
                await socket.close(RESTART, RESTART_REASON)
            else:
                await viewer.close()
        finally:
            await session.aclose()


class Viewer:
    def __init__(self, socket: Socket, session: TerminalSession, *, binary: bool) -> None:
        self._socket = socket
        self._session = session
        self._framed = socket.offers(FRAMED)
        self._binary = binary or self._framed

    async def open(self) -> None:
        socket = self._socket
        await socket.accept(FRAMED if self._framed else RAW if socket.offers(RAW) else None)
        if self._framed:
            session = self._session
            await socket.tell("opened", {"session": session.name, "exec_id": session.exec_id})

    async def output(self) -> None:
        cut = TextCut()
        async for data in self._session:
            if self._binary:
                await self._socket.say(data)
            elif text := cut.feed(data):
                await self._socket.say(text)
        if not self._binary and (rest := cut.flush()):
            await self._socket.say(rest)

    async def input(self, inbox: Inbox) -> None:
        async for message in inbox:
            if self._framed and isinstance(message, str):
                await self._obey(message)
            else:
                await self._type(message)

    async def _type(self, message: str | bytes) -> None:
        await self._session.send(message.encode() if isinstance(message, str) else message)

    async def _obey(self, message: str) -> None:
        control = parse(_CONTROL, message.encode())
        if isinstance(control, Resize):
            await self._session.resize(control.rows, control.cols)
        else:
            await self._type(control.data)

    async def close(self) -> None:
        closing = self._session.closing or Closing("left", "the terminal was left")
        if self._framed and closing.exit is not None:
            await self._socket.tell("exit", ExitView.of(self._session.exec_id, closing.exit))
        await self._socket.close(CLOSE_CODES[closing.code], closing.message)
