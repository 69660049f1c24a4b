"""Large answers go out piece by piece: a client that reads slowly holds up its own request, and the
memory that the request has taken (`service.room`) is given back when the answer is out.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capsule.service.room import holding

PIECE = 256 * 1024


def in_pieces(app: ASGIApp) -> ASGIApp:
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def cut(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) > PIECE and message["type"] == "http.response.body":
                await _send_pieces(message, body, send)
            else:
                await send(message)

        with holding():
            await app(scope, receive, cut if scope["type"] == "http" else send)

    return run


async def _send_pieces(message: Message, body: bytes, send: Send) -> None:
    """Each `send` waits until the transport has taken most of what came before."""
    last = (len(body) - 1) // PIECE * PIECE
    for start in range(0, last, PIECE):
        await send({**message, "body": body[start : start + PIECE], "more_body": True})
    await send({**message, "body": body[last:]})
