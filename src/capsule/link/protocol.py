"""The agent's frames, without any I/O: bytes in, frames out, and back (see spec/agent-protocol.md).

What arrives comes from a process that hostile code shares a kernel with, so everything here is
bounded and anything unexpected is a `ProtocolError`, whatever the bytes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple, NoReturn

import msgspec

from capsule.errors import InvalidError, TooLargeError, UnavailableError

VERSION = 1
MAX_PAYLOAD = 1024 * 1024

HEADER = Struct(">IBBHQ")
HEADER_SIZE = HEADER.size


class ProtocolError(UnavailableError):
    """The other side does not speak our protocol: what it says cannot be trusted any more."""


class FrameType(IntEnum):
    HELLO = 1
    REQUEST = 2
    REPLY = 3
    ERROR = 4
    DATA = 5
    EOF = 6
    EVENT = 7
    EXIT = 8
    CONTROL = 9


class Channel(IntEnum):
    """What the header's `stream` field says about a DATA or EOF frame."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    TERMINAL = 3
    FILE = 4
    CARRY = 5
    DIALLED = 6


class Frame(NamedTuple):
    type: FrameType
    stream: int = 0
    offset: int = 0
    payload: bytes = b""


# Looked up once per frame; calling the enum itself costs five times as much.
_TYPES: tuple[FrameType | None, ...] = (None, *FrameType)


def encode(frame: Frame) -> bytes:
    return pack(frame.type, frame.payload, stream=frame.stream, offset=frame.offset)


def pack(type: FrameType, payload: bytes = b"", *, stream: int = 0, offset: int = 0) -> bytes:
    """`encode` without a Frame in between."""
    if len(payload) > MAX_PAYLOAD:
        raise TooLargeError(
            f"message to the agent too large: {len(payload)} bytes, limit {MAX_PAYLOAD}",
            hint="send less in one request, or write the data to a file",
            limit=MAX_PAYLOAD,
        )
    return HEADER.pack(len(payload), type, stream, 0, offset) + payload


class Decoder:
    """Cuts a byte stream into frames, holding at most one unfinished one.

    `feed` is for streams that are frames to the end. Where frames give way to raw bytes (`dial`),
    use `push` and `pop`, and `rest` after the last frame.
    """

    __slots__ = ("_broken", "_buffer", "_position")

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""
        self._position = 0
        self._broken: str | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises ProtocolError, from then on every time."""
        self.push(data)
        frames = []
        while (frame := self.pop()) is not None:
            frames.append(frame)
        return frames

    def push(self, data: bytes) -> None:
        buffer = self._buffer
        if self._position == len(buffer):  # the usual case: whole frames arrived, nothing is copied
            self._buffer = data
        elif isinstance(buffer, bytearray):
            del buffer[: self._position]
            buffer += data
        else:
            joined = bytearray(memoryview(buffer)[self._position :])
            joined += data
            self._buffer = joined
        self._position = 0

    def pop(self) -> Frame | None:
        """The next whole frame, or None until more is pushed."""
        if self._broken is not None:
            raise ProtocolError(self._broken)
        buffer, start = self._buffer, self._position
        available = len(buffer) - start - HEADER_SIZE
        if available < 0:
            return None
        length, number, stream, _, offset = HEADER.unpack_from(buffer, start)
        if length > MAX_PAYLOAD:
            self._break(f"frame too large: {length} bytes, limit {MAX_PAYLOAD}")
        if not 0 < number < len(_TYPES):
            self._break(f"unknown frame type: {number}")
        if available < length:
            return None
        start += HEADER_SIZE
        self._position = end = start + length
        payload = buffer[start:end] if isinstance(buffer, bytes) else bytes(buffer[start:end])
        return Frame(_TYPES[number], stream, offset, payload)

    def rest(self) -> bytes:
        """Takes what was pushed and not popped."""
        rest = bytes(memoryview(self._buffer)[self._position :])
        self._buffer, self._position = b"", 0
        return rest

    @property
    def buffered(self) -> int:
        return len(self._buffer) - self._position

    def _break(self, message: str) -> NoReturn:
        self._broken = message
        self._buffer, self._position = b"", 0
        raise ProtocolError(message)


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Several times as quick; what they do not take goes the other way, or is explained there.
_encode_quickly = msgspec.json.Encoder().encode
_decode_quickly = msgspec.json.Decoder().decode
_encode_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
_decode = json.JSONDecoder(parse_constant=_reject).decode


def dump(value: Any) -> bytes:
    r"""JSON as the agent reads it: a byte that is not UTF-8 travels as `\udcXX`.

    Raises InvalidError for what no Linux name can be (a surrogate that escapes no byte), and for
    NaN.
    """
    with suppress(UnicodeEncodeError, TypeError, RecursionError):
        quick = _encode_quickly(value)
        if not _has_null(quick):  # which NaN would be
            return quick
    try:
        text = _encode_plain(value)
    except ValueError as exc:
        raise InvalidError(f"cannot be sent to the agent: {exc}") from None
    try:
        return text.encode()
    except UnicodeEncodeError:
        pass
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        character = f"U+{ord(text[exc.start]):04X}"
        raise InvalidError(
            f"text contains a lone surrogate: {character}",
            hint="only U+DC80 to U+DCFF stand for bytes (Python's surrogateescape)",
        ) from None
    return _encode_ascii(value).encode()


def _has_null(text: bytes) -> bool:
    """As a value, or where it looks like one. What is in a string mostly does not: /dev/null."""
    return b"null" in text and (
        b":null" in text or b",null" in text or b"[null" in text or text == b"null"
    )


def load(payload: bytes) -> dict[str, Any]:
    """The object in a control frame. Raises ProtocolError for anything else."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if type(quick := _decode_quickly(payload)) is dict:
            return quick
    try:
        value = _decode(payload.decode())
    except RecursionError:
        raise ProtocolError("control frame too deep") from None
    except ValueError as exc:  # bad UTF-8, bad JSON, integers of thousands of digits
        raise ProtocolError(f"control frame is not JSON: {str(exc)[:200]}") from None
    if b"\\u" in payload:
        _check_surrogates(value)
    if not isinstance(value, dict):
        raise ProtocolError(f"control frame holds no object, but {type(value).__name__}")
    return value


def _check_surrogates(value: Any) -> None:
    """Python's JSON takes any surrogate, and then fails wherever the text is next encoded."""
    try:
        _encode_plain(value).encode("utf-8", "surrogateescape")
    except (ValueError, RecursionError):
        raise ProtocolError("control frame holds a surrogate that stands for no byte") from None
