"""All that a box has written, as a stream (spec/agent-protocol.md: save, fill)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any

from capsule.link.conversation import Connect, Conversation, request_bytes
from capsule.link.files import Upload
from capsule.link.protocol import Channel, FrameType, ProtocolError, load


async def save(
    connect: Connect,
    about: dict[str, Any],
    request: Mapping[str, Any],
    *,
    timeout: float,
    idle: float,
) -> AsyncGenerator[bytes, None]:
    """The box stands still from the first piece to the last, or until this is closed. What the
    agent says of it comes at the end, into `about`.

    Raises NotSupportedError, ConflictError (it is being saved already, or cannot be stopped),
    TooLargeError (folders too deep).
    """
    wire = request_bytes({"op": "save", **request})
    talk = await Conversation.begin_within(timeout, connect, wire, what="save")
    received = 0
    async with talk:
        while True:
            frame = await talk.next_within(idle, "save")
            if frame.type is FrameType.REPLY:
                about.update(load(frame.payload))
                return
            if frame.type is not FrameType.DATA or frame.stream != Channel.FILE:
                raise ProtocolError(f"agent sent {frame.type.name} while a box was saved")
            if frame.offset != received:
                raise ProtocolError(f"agent sent {frame.offset}, expected {received}")
            received += len(frame.payload)
            yield frame.payload


async def fill(
    connect: Connect, pieces: AsyncIterable[bytes], *, timeout: float, idle: float
) -> None:
    wire = request_bytes({"op": "fill"})
    async with await Conversation.begin_within(timeout, connect, wire, what="fill") as talk:
        await Upload(talk, "fill", idle).run(pieces)
