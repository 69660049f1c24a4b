"""A running exec as seen from the host: its output as it comes, its exit, and the way in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

from capsule.errors import UnavailableError, WrongStateError
from capsule.link.conversation import PIECE, Conversation
from capsule.link.parse import exit_of, field
from capsule.link.protocol import Channel, Frame, FrameType, ProtocolError, dump, load, pack
from capsule.model import ExecId, Exit, Stream

MAX_CARRY = 256 * 1024
_QUIET = 20.0  # silence after which we ask the agent whether it still lives
OVERTIME = 15.0  # what the agent may need beyond an exec's timeout to kill it and say so

_STREAMS: dict[int, Stream] = {
    Channel.STDOUT: Stream.STDOUT,
    Channel.STDERR: Stream.STDERR,
    Channel.TERMINAL: Stream.PTY,
}


@dataclass(frozen=True, slots=True)
class Output:
    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes `start` to `end` were dropped before we could read them (`keep="tail"`)."""

    stream: Stream
    start: int
    end: int


class ExecStream:
    """Iterate for output; `exit` is set when that ends. Closing leaves the program running.

    If the connection breaks first, the iterator raises UnavailableError and `exit` stays None:
    attach again from the offsets that were reached.
    """

    def __init__(
        self,
        talk: Conversation,
        exec_id: ExecId,
        pid: int,
        *,
        alive: Callable[[], Awaitable[object]],
        tty: bool = False,
        timeout: float = 0.0,
        start: dict[Stream, int] | None = None,
    ) -> None:
        self.exec_id = exec_id
        self.pid = pid
        self.exit: Exit | None = None
        self._talk = talk
        self._alive = alive
        self._tty = tty
        self._positions = {Stream.STDOUT: 0, Stream.STDERR: 0, Stream.PTY: 0} | (start or {})
        self._carry = b""
        self._sent = 0
        self._sending = asyncio.Lock()  # frames of two senders must not interleave
        now = asyncio.get_running_loop().time()
        self._overdue = now + timeout + OVERTIME if timeout else float("inf")

    @property
    def carry(self) -> bytes:
        """What the program wrote to fd 3, once it has ended."""
        return self._carry

    @property
    def offsets(self) -> dict[Stream, int]:
        """How far each stream has been read: where to attach again."""
        return dict(self._positions)

    @property
    def broken(self) -> bool:
        """It is known to be of no use any more. Not every stream can tell before it is used."""
        return bool(getattr(self._talk.stream, "broken", False))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output | Gap:
        while self.exit is None:
            frame = await self._talk.next_patiently(self._still_there, _QUIET)
            item = self._take(frame)
            if item is not None:
                return item
        raise StopAsyncIteration

    async def _still_there(self) -> None:
        await self._alive()
        if asyncio.get_running_loop().time() > self._overdue:
            raise UnavailableError(
                f"agent did not end exec {self.exec_id} at its timeout", exec_id=self.exec_id
            )

    def _take(self, frame: Frame) -> Output | Gap | None:
        match frame.type:
            case FrameType.DATA if frame.stream == Channel.CARRY:
                self._take_carry(frame.payload)
            case FrameType.DATA:
                return self._take_data(frame)
            case FrameType.EVENT:
                return self._take_event(load(frame.payload))
            case FrameType.EXIT:
                self.exit = exit_of(load(frame.payload))
            case FrameType.EOF:
                pass
            case _:
                raise ProtocolError(f"agent sent {frame.type.name} during an exec")
        return None

    def _take_data(self, frame: Frame) -> Output | None:
        stream = _STREAMS.get(frame.stream)
        if stream is None:
            raise ProtocolError(f"agent sent output on stream {frame.stream}")
        if frame.offset != self._positions[stream]:
            raise ProtocolError(
                f"agent sent {stream} from {frame.offset}, expected {self._positions[stream]}"
            )
        self._positions[stream] += len(frame.payload)
        self._tty = self._tty or stream is Stream.PTY  # `attach` cannot know beforehand
        return Output(stream, frame.offset, frame.payload) if frame.payload else None

    def _take_carry(self, data: bytes) -> None:
        self._carry += data
        if len(self._carry) > MAX_CARRY:
            raise ProtocolError(f"agent sent too much carry, limit {MAX_CARRY}")

    def _take_event(self, body: dict[str, Any]) -> Gap | None:
        if "gap" not in body:
            return None  # events of a later version say nothing about the bytes
        stream = _STREAMS.get(field(body, "gap", int))
        start, end = field(body, "from", int), field(body, "to", int)
        if stream is None or start != self._positions[stream] or end < start:
            raise ProtocolError(f"agent sent an impossible gap: {start} to {end}")
        self._positions[stream] = end
        return Gap(stream, start, end)

    async def send(self, data: bytes) -> None:
        """To the program's stdin or terminal. Returns when the agent has room for more.

        Raises WrongStateError once the exit was seen, UnavailableError when the stream is over.
        """
        channel = Channel.TERMINAL if self._tty else Channel.STDIN
        async with self._sending:
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                await self._write(pack(FrameType.DATA, piece, stream=channel, offset=self._sent))
                self._sent += len(piece)

    async def send_eof(self) -> None:
        async with self._sending:
            await self._write(pack(FrameType.EOF, stream=Channel.STDIN, offset=self._sent))

    async def signal(self, name: str, *, tree: bool = False) -> None:
        """To the main (or the terminal's foreground) process group, or to everything it started."""
        await self._control({"signal": name, "tree": True} if tree else {"signal": name})

    async def resize(self, rows: int, cols: int) -> None:
        await self._control({"resize": [rows, cols]})

    async def _control(self, body: dict[str, Any]) -> None:
        async with self._sending:
            await self._write(pack(FrameType.CONTROL, dump(body)))

    async def _write(self, data: bytes) -> None:
        if self.exit is not None:
            raise WrongStateError(f"exec {self.exec_id} has ended", exec_id=self.exec_id)
        await self._talk.send_patiently(data, self._still_there, _QUIET)

    async def aclose(self) -> None:
        await self._talk.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
