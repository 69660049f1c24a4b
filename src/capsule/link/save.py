"""All that a box has written, as a stream (spec/agent-protocol.md: save)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from capsule.link.conversation import Connect, Conversation, request_bytes
from capsule.link.parse import field
from capsule.link.protocol import Channel, FrameType, ProtocolError, load


async def save(
    connect: Connect, *, full: bool, timeout: float, idle: float
) -> AsyncGenerator[bytes, None]:
    """The box stands still from the first piece to the last, or until this is closed.

    Raises NotSupportedError, ConflictError (it is being saved already, or cannot be stopped),
    TooLargeError (folders too deep).
    """
    wire = request_bytes({"op": "save", "full": full})
    talk = await Conversation.begin_within(timeout, connect, wire, what="save")
    received = 0
    async with talk:
        while True:
            frame = await talk.next_within(idle, "save")
            if frame.type is FrameType.REPLY:
                field(load(frame.payload), "files", int)
                return
            if frame.type is not FrameType.DATA or frame.stream != Channel.FILE:
                raise ProtocolError(f"agent sent {frame.type.name} while a box was saved")
            if frame.offset != received:
                raise ProtocolError(f"agent sent {frame.offset}, expected {received}")
            received += len(frame.payload)
            yield frame.payload
