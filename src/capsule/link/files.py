"""Reading and writing files of a box, as streams of any size in constant memory."""

from __future__ import annotations

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
)
from capsule.link.errors_map import to_error
from capsule.link.parse import field, file_stat, number
from capsule.link.protocol import Channel, FrameType, ProtocolError, load, pack
from capsule.model import FileStat


class Listing(NamedTuple):
    entries: list[FileStat]
    truncated: bool


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
            await _Upload(talk, path, idle).send(data)
        frame = await talk.next_within(idle, f"write {path}")
        return file_stat(expect(frame, FrameType.REPLY))


class _Upload:
    """The content of a file on its way in.

    A refusal (no space, no permission) makes the agent hang up on us. Why is in the frame that it
    left behind, so a failed send only ends the sending; what the source of the data raises is not
    ours.
    """

    def __init__(self, talk: Conversation, path: str, idle: float) -> None:
        self._talk = talk
        self._what = f"write {path}"
        self._idle = idle
        self._offset = 0
        self._refused = False

    async def send(self, data: bytes | AsyncIterable[bytes]) -> None:
        if isinstance(data, AsyncIterable):
            async for chunk in data:
                await self._pieces(chunk)
                if self._refused:
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
        if self._refused:
            return
        try:
            await self._talk.send_within(frame, self._idle, self._what)
        except UnavailableError:
            self._refused = True


async def list_entries(
    connect: Connect, path: str, *, recursive: bool, limit: int, timeout: float, idle: float
) -> Listing:
    wire = request_bytes({"op": "list", "path": path, "recursive": recursive, "limit": limit})
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
