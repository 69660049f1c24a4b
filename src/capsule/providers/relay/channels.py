"""The relay's frames and credits, without any I/O: bytes in, events out (see spec/relay.md).

What arrives comes from a container that hostile code runs in, so everything here is bounded, and
anything unexpected is a `ProtocolError`, whatever the bytes.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heappop, heappush
from struct import Struct
from typing import NamedTuple

from capsule.errors import CapacityError
from capsule.link.protocol import ProtocolError

VERSION = 1
MAX_CHANNELS = 1024
MAX_DATA = 64 * 1024  # in one frame
WINDOW = 256 * 1024  # what may be under way on a channel, in each direction

HEADER = Struct(">III")
HEADER_SIZE = HEADER.size
_LARGEST_ERRNO = 4095  # the kernel's own bound


class Kind(IntEnum):
    HELLO = 1
    OPEN = 2
    DATA = 3
    EOF = 4
    CLOSE = 5
    WINDOW = 6


class Channel:
    """One connection to the agent. Its number is used again once both sides have closed it."""

    __slots__ = ("closed", "credit", "ended", "expected", "number", "owed")

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False  # by us: nothing is sent any more
        self.ended = False  # by the agent: it sends nothing more, but may still read
        self.credit = WINDOW  # what we may still send
        self.expected = WINDOW  # what the other side may still send
        self.owed = 0  # what was consumed here since the other side was last told


class Arrived(NamedTuple):
    channel: Channel
    data: bytes


class Credited(NamedTuple):
    channel: Channel


class Ended(NamedTuple):
    channel: Channel


class Closed(NamedTuple):
    """The connection is over. `errno` is why it broke, or was never made; 0: the agent hung up."""

    channel: Channel
    errno: int


Event = Arrived | Credited | Ended | Closed


def pack(kind: Kind, channel: int = 0, value: int = 0, payload: bytes | memoryview = b"") -> bytes:
    return HEADER.pack(channel, kind, value) + payload


class Channels:
    """Every channel over one carrier. Whatever is to be sent is appended to `out`.

    Each side says CLOSE exactly once for a channel. Ours answers the other side's by itself, so
    that no number is lost with whoever forgets to close. A channel that we have closed has no
    events any more.
    """

    def __init__(self) -> None:
        self.out = bytearray(pack(Kind.HELLO, 0, VERSION))
        self.greeted = False
        self._buffer = bytearray()
        self._broken: str | None = None
        self._channels: dict[int, Channel] = {}
        self._free: list[int] = []
        self._next = 0

    def open(self) -> Channel:
        if self._free:
            number = heappop(self._free)
        elif self._next < MAX_CHANNELS:
            number, self._next = self._next, self._next + 1
        else:
            raise CapacityError(f"too many connections to one sandbox, limit {MAX_CHANNELS}")
        self._channels[number] = channel = Channel(number)
        self.out += pack(Kind.OPEN, number)
        return channel

    def send(self, channel: Channel, data: bytes | memoryview) -> int:
        """How much of it went into one frame: none without credit. Not for a closed channel."""
        size = min(len(data), channel.credit, MAX_DATA)
        if size:
            self.out += pack(Kind.DATA, channel.number, size, memoryview(data)[:size])
            channel.credit -= size
        return size

    def consumed(self, channel: Channel, size: int) -> None:
        """So many bytes that arrived are needed no more, and as many may come."""
        channel.owed += size
        if channel.owed >= WINDOW // 2 and not channel.closed and not channel.ended:
            self.out += pack(Kind.WINDOW, channel.number, channel.owed)
            channel.expected += channel.owed
            channel.owed = 0

    def close(self, channel: Channel) -> None:
        if not channel.closed:
            channel.closed = True
            self.out += pack(Kind.CLOSE, channel.number)

    @property
    def rest(self) -> bytes:
        """What arrived and is no whole frame."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Event]:
        """What `data` completes. Raises ProtocolError, from then on every time."""
        if self._broken is not None:
            raise ProtocolError(self._broken)
        self._buffer += data
        try:
            return self._frames()
        except ProtocolError as exc:
            self._broken = exc.message
            self._buffer.clear()
            raise

    def _frames(self) -> list[Event]:
        events: list[Event] = []
        buffer, start = self._buffer, 0
        while len(buffer) - start >= HEADER_SIZE:
            number, kind, value = HEADER.unpack_from(buffer, start)
            size = value if kind == Kind.DATA else 0
            if size > MAX_DATA:
                raise ProtocolError(f"relay sent too much in a frame: {size}, limit {MAX_DATA}")
            if not self.greeted:
                self._greet(number, kind, value)
            elif len(buffer) - start < HEADER_SIZE + size:
                break
            else:
                first = start + HEADER_SIZE
                channel = self._find(number, kind)
                if size:
                    self._data(events, channel, bytes(buffer[first : first + size]))
                else:
                    self._control(events, channel, kind, value)
            start += HEADER_SIZE + size
        del buffer[:start]
        return events

    def _greet(self, number: int, kind: int, value: int) -> None:
        if kind != Kind.HELLO or number or not value:
            # Most likely the words of an engine that could not start it.
            text = bytes(self._buffer[:300]).decode("utf-8", "replace").strip()
            raise ProtocolError(f"the relay did not start, but said: {text!r}")
        self.greeted = True

    def _find(self, number: int, kind: int) -> Channel:
        channel = self._channels.get(number)
        if channel is None:
            raise ProtocolError(f"relay sent a frame of kind {kind} on no channel: {number}")
        return channel

    def _data(self, events: list[Event], channel: Channel, data: bytes) -> None:
        if channel.ended or len(data) > channel.expected:
            raise ProtocolError(f"relay sent more than it may on channel {channel.number}")
        channel.expected -= len(data)
        if not channel.closed:
            events.append(Arrived(channel, data))

    def _control(self, events: list[Event], channel: Channel, kind: int, value: int) -> None:
        event: Event
        if kind == Kind.WINDOW and 0 < value <= WINDOW - channel.credit:
            channel.credit += value
            event = Credited(channel)
        elif kind == Kind.EOF and not value and not channel.ended:
            channel.ended = True
            event = Ended(channel)
        elif kind == Kind.CLOSE and value <= _LARGEST_ERRNO:
            event = Closed(channel, value)
        else:
            raise ProtocolError(f"relay sent a frame of kind {kind} with {value}")
        if not channel.closed:
            events.append(event)
        if kind == Kind.CLOSE:
            self.close(channel)
            del self._channels[channel.number]
            heappush(self._free, channel.number)
