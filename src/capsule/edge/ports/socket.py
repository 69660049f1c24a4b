"""One WebSocket to a program in a sandbox. Ours ends here and another begins: messages are passed
on whole, with the subprotocol that both chose, and closes with their codes.

    carry ─┬─ out      program → client
           ├─ in       client → program
           └─ closing  the server stops
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import Event
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from capsule.edge.ports import pages
from capsule.edge.ports.headers import outwards
from capsule.edge.ports.http import ANSWER_PATIENCE, CLOSED, TAKE_PATIENCE, Headers
from capsule.edge.sockets import FAULT, RESTART, RESTART_REASON, Left, Socket, race
from capsule.errors import UnavailableError
from capsule.link.stream import ByteStream

MAX_MESSAGE = 16 * 1024 * 1024
_MUTE = frozenset({1005, 1006, 1015})  # codes that mean that there was none


async def carry(
    stream: ByteStream,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: Headers,
    protocols: list[str],
    closing: asyncio.Event,
) -> None:
    """Raises PortError before the handshake, Left when the client goes."""
    peer = Peer(stream, scope, headers, protocols)
    response = await peer.shake_hands()
    socket = Socket(scope, receive, send)
    if response.status_code != 101:
        await _refuse(response, send)
        return
    await socket.accept(peer.protocol, outwards(_raw(response)))
    if await race(peer.pass_out(socket), peer.pass_in(socket), closing.wait()) == 2:
        await socket.close(RESTART, RESTART_REASON)


class Peer:
    """The program's end."""

    def __init__(
        self, stream: ByteStream, scope: Scope, headers: Headers, protocols: list[str]
    ) -> None:
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        offered = [Subprotocol(name) for name in protocols] or None
        self._stream = stream
        self._talk = ClientProtocol(
            WebSocketURI(False, "sandbox", 80, path, query),
            subprotocols=offered,
            max_size=MAX_MESSAGE,
        )
        self._request = self._talk.connect()
        del self._request.headers["Host"]
        for name, value in headers:
            self._request.headers[name.decode("latin-1")] = value.decode("latin-1")
        self._early: list[Event] = []  # what came with its answer
        # Answers to pings go out between messages.
        self._sending = asyncio.Lock()

    @property
    def protocol(self) -> str | None:
        return self._talk.subprotocol

    async def shake_hands(self) -> Response:
        """With 101, or with the program's refusal. Raises PortError."""
        self._talk.send_request(self._request)
        try:
            async with asyncio.timeout(ANSWER_PATIENCE):
                await self._flush()
                while True:
                    events = self._talk.events_received()
                    if events and isinstance(response := events[0], Response):
                        self._early = events[1:]
                        return self._checked(response)
                    if self._talk.handshake_exc is not None:
                        raise pages.no_answer(f"speaks no WebSocket: {self._talk.handshake_exc}")
                    await self._take()
        except UnavailableError:
            raise pages.no_answer(CLOSED) from None
        except TimeoutError:
            raise pages.silent(ANSWER_PATIENCE) from None

    def _checked(self, response: Response) -> Response:
        if response.status_code == 101 and self._talk.handshake_exc is not None:
            raise pages.no_answer(f"speaks no WebSocket: {self._talk.handshake_exc}")
        return response

    async def pass_out(self, socket: Socket) -> None:
        kind, parts = Opcode.BINARY, list[bytes]()
        try:
            while True:
                for frame in self._frames():
                    if frame.opcode is Opcode.CLOSE:
                        await self._flush()
                        await self._close(socket)
                        return
                    if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
                        kind, parts = frame.opcode, []
                    if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                        parts.append(bytes(frame.data))
                        if frame.fin:
                            await _say(socket, kind, b"".join(parts))
                await self._flush()
                if self._talk.parser_exc is not None:
                    await self._close(socket)
                    return
                await self._take()
        except UnavailableError:
            await socket.close(FAULT, "the connection to the program was lost")

    async def pass_in(self, socket: Socket) -> None:
        while True:
            try:
                message = await socket.receive()
            except Left as left:
                await self._leave(left)
                raise
            try:
                if isinstance(message, str):
                    self._talk.send_text(message.encode())
                else:
                    self._talk.send_binary(message)
            except InvalidState:  # it has closed; `pass_out` tells
                continue
            await self._flush()

    async def _leave(self, left: Left) -> None:
        try:
            if left.code in _MUTE:
                self._talk.send_close()
            else:
                self._talk.send_close(left.code, left.reason)
            await self._flush()
        except (InvalidState, UnavailableError):
            pass

    async def _close(self, socket: Socket) -> None:
        """As the program did, or as we did for it when it broke the rules."""
        closed = self._talk.close_rcvd or self._talk.close_sent
        code = 1000 if closed is None or closed.code in _MUTE else closed.code
        await socket.close(code, "" if closed is None else closed.reason)

    def _frames(self) -> list[Frame]:
        events, self._early = [*self._early, *self._talk.events_received()], []
        return [event for event in events if isinstance(event, Frame)]

    async def _take(self) -> None:
        data = await self._stream.receive()
        if data:
            self._talk.receive_data(data)
            return
        self._talk.receive_eof()
        if self._talk.close_rcvd is None and self._talk.handshake_exc is None:
            raise UnavailableError("the program closed the connection")

    async def _flush(self) -> None:
        async with self._sending:
            data = b"".join(self._talk.data_to_send())
            if not data:
                return
            try:
                async with asyncio.timeout(TAKE_PATIENCE):
                    await self._stream.send(data)
            except TimeoutError:
                raise UnavailableError("the program takes no messages") from None


async def _say(socket: Socket, kind: Opcode, data: bytes) -> None:
    if kind is Opcode.TEXT:
        await socket.say(data.decode("utf-8", "replace"))
    else:
        await socket.say(data)


async def _refuse(response: Response, send: Send) -> None:
    headers = [h for h in outwards(_raw(response)) if h[0] != b"content-length"]
    body = bytes(response.body or b"")
    headers.append((b"content-length", b"%d" % len(body)))
    prefix = "websocket.http.response"
    await send({"type": f"{prefix}.start", "status": response.status_code, "headers": headers})
    await send({"type": f"{prefix}.body", "body": body})


def _raw(response: Response) -> Headers:
    return [(n.encode("latin-1"), v.encode("latin-1")) for n, v in response.headers.raw_items()]
