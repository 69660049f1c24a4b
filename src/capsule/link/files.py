"""Reading and writing files of a box, as streams of any size in constant memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self

from capsule.errors import UnavailableError
from capsule.link.conversation import (
    PIECE,
    Connect,
    Conversation,
    Explain,
    expect,
    request_bytes,
    silence,
)
from capsule.link.errors_map import to_error
from capsule.link.parse import field, file_stat, number
from capsule.link.protocol import Channel, FrameType, ProtocolError, load, pack
from capsule.model import Detail, FileStat


class Listing(NamedTuple):
    entries: list[FileStat]
    truncated: bool


def asked(detail: Detail | None) -> dict[str, Any]:
    """What a request says of it."""
    if detail is None:
        return {}
    return {"detail": True, **({"attributes": detail.attributes} if detail.attributes else {})}


def explain_path(path: str) -> Explain:
    return lambda body: to_error(body, path=path)


class FileReader:
    """A file being read. Iterate it once; a file that shrinks meanwhile simply ends earlier."""

    def __init__(self, talk: Conversation, about: dict[str, Any], path: str, idle: float) -> None:
        self.size = field(about, "size", int)
        self.mode = field(about, "mode", int)
        self.mtime = number(about, "mtime")
        self._talk = talk
        self._path = path
        self._idle = idle
        self._done = False
        self._received = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._done:
            frame = await self._talk.next_within(self._idle, f"read {self._path}")
            if frame.type is FrameType.DATA and frame.stream == Channel.FILE:
                self._received += len(frame.payload)
                return frame.payload
            if frame.type is FrameType.REPLY:
                self._finish(field(load(frame.payload), "bytes", int))
            elif frame.type is not FrameType.EOF:
                raise ProtocolError(f"agent sent {frame.type.name} while reading a file")
        raise StopAsyncIteration

    def _finish(self, size: int) -> None:
        self._done = True
        if size != self._received:
            raise ProtocolError(f"file content lost on the way: {self._path}")


@asynccontextmanager
async def read(
    connect: Connect, path: str, *, offset: int, length: int, timeout: float, idle: float
) -> AsyncIterator[FileReader]:
    wire = request_bytes({"op": "read", "path": path, "offset": offset, "length": length})
    talk = await _begin(connect, wire, path, timeout, "read")
    async with talk:
        about = expect(await talk.next_within(timeout, f"read {path}"), FrameType.EVENT)
        yield FileReader(talk, about, path, idle)


async def write(
    connect: Connect,
    path: str,
    data: bytes | AsyncIterable[bytes],
    options: dict[str, Any],
    *,
    timeout: float,
    idle: float,
) -> FileStat:
    wire = request_bytes({"op": "write", "path": path, **options})
    small = isinstance(data, bytes) and len(data) <= PIECE
    if isinstance(data, bytes) and small:  # all in one write
        wire += pack(FrameType.DATA, data, stream=Channel.FILE) if data else b""
        wire += pack(FrameType.EOF, stream=Channel.FILE, offset=len(data))
    async with await _begin(connect, wire, path, timeout, "write") as talk:
        if not small:
            return file_stat(await Upload(talk, f"write {path}", idle).run(data))
        frame = await talk.next_within(idle, f"write {path}")
        return file_stat(expect(frame, FrameType.REPLY))


class Upload:
    """A stream on its way in, such as the content of a file.

    A refusal (no space, no permission) comes while we still send. A task of this object's waits
    for it, so that not one piece more than needed is sent; `run` ends the task.
    """

    def __init__(self, talk: Conversation, what: str, idle: float) -> None:
        self._talk = talk
        self._what = what
        self._idle = idle
        self._offset = 0

    async def run(self, data: bytes | AsyncIterable[bytes]) -> dict[str, Any]:
        """The agent's answer, which comes when it has all of it."""
        self._answer = asyncio.create_task(self._talk.next())
        try:
            await self._send(data)
            done, _ = await asyncio.wait({self._answer}, timeout=self._idle)
            if not done:
                raise silence(self._what, self._idle)
            return expect(self._answer.result(), FrameType.REPLY)
        finally:
            self._answer.cancel()
            await asyncio.wait({self._answer})
            if not self._answer.cancelled():
                self._answer.exception()  # seen, also where the sending failed first

    async def _send(self, data: bytes | AsyncIterable[bytes]) -> None:
        if isinstance(data, AsyncIterable):
            async for chunk in data:
                await self._pieces(chunk)
                if self._answer.done():
                    return
        else:
            await self._pieces(data)
        await self._frame(pack(FrameType.EOF, stream=Channel.FILE, offset=self._offset))

    async def _pieces(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        for start in range(0, len(view), PIECE):
            piece = bytes(view[start : start + PIECE])
            await self._frame(pack(FrameType.DATA, piece, stream=Channel.FILE, offset=self._offset))
            self._offset += len(piece)

    async def _frame(self, frame: bytes) -> None:
        if self._answer.done():
            return
        try:
            await self._talk.send_within(frame, self._idle, self._what)
        except UnavailableError:
            # Hung up on: the answer says why. Only silence is what it looks like.
            if not (await asyncio.wait({self._answer}, timeout=1.0))[0]:
                raise


async def list_entries(
    connect: Connect,
    path: str,
    options: dict[str, Any],
    *,
    limit: int,
    timeout: float,
    idle: float,
) -> Listing:
    wire = request_bytes({"op": "list", "path": path, "limit": limit, **options})
    entries: list[FileStat] = []
    async with await _begin(connect, wire, path, timeout, "list") as talk:
        while True:
            frame = await talk.next_within(idle, f"list {path}")
            if frame.type is FrameType.REPLY:
                return Listing(entries, field(load(frame.payload), "truncated", bool))
            some = field(expect(frame, FrameType.EVENT), "entries", list)
            entries.extend(map(file_stat, some))
            if len(entries) > limit:
                raise ProtocolError(f"agent listed more than asked for, limit {limit}")


async def _begin(
    connect: Connect, wire: bytes, path: str, timeout: float, verb: str
) -> Conversation:
    what, explain = f"{verb} {path}", explain_path(path)
    return await Conversation.begin_within(timeout, connect, wire, what=what, explain=explain)
