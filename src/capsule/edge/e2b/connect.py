"""The Connect protocol with JSON, as E2B's SDKs speak it: plain JSON for one question and one
answer, envelopes (a byte of flags, a length, JSON) for streams, the last of which says how it went.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec

from capsule.edge.errors import encode, one_line, sentence
from capsule.errors import CapsuleError

T = TypeVar("T")

UNARY = b"application/json"
STREAM = b"application/connect+json"
END = 0x02
MAX_ENVELOPE = 4 * 1024 * 1024  # the SDKs send input as it was given, in one

# What our errors are called there, by our code; HTTP's status by theirs.
CODES = {
    "invalid": "invalid_argument",
    "unauthenticated": "unauthenticated",
    "forbidden": "permission_denied",
    "not_found": "not_found",
    "gone": "not_found",
    "conflict": "already_exists",
    "wrong_state": "failed_precondition",
    "capacity": "resource_exhausted",
    "no_space": "failed_precondition",  # not "try again later", as the SDKs read the one above
    "too_large": "invalid_argument",
    "unsupported": "unimplemented",
    "unavailable": "unavailable",
    "internal": "internal",
}
STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}


class RpcError(Exception):
    """An error in Connect's words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @classmethod
    def of(cls, error: CapsuleError) -> RpcError:
        return cls(CODES.get(error.code, "unknown"), one_line(sentence(error)))

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def body(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message}


def envelope(message: Any, flags: int = 0) -> bytes:
    body = encode(message)
    return bytes((flags,)) + len(body).to_bytes(4, "big") + body


def end(error: RpcError | None = None) -> bytes:
    return envelope({} if error is None else {"error": error.body()}, END)


async def envelopes(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The messages of a streamed request, each as JSON; raises RpcError for what is none."""
    kept = bytearray()
    async for piece in pieces:
        kept += piece
        while len(kept) >= 5:
            size = int.from_bytes(kept[1:5], "big")
            if size > MAX_ENVELOPE:
                raise RpcError(
                    "invalid_argument",
                    f"a message of {size} bytes, at most {MAX_ENVELOPE}: send it in parts",
                )
            if len(kept) < 5 + size:
                break
            flags, message = kept[0], bytes(kept[5 : 5 + size])
            del kept[: 5 + size]
            if flags & 1:
                raise RpcError("unimplemented", "compressed messages are not understood")
            if not flags & END:
                yield message
    if kept:
        raise RpcError("invalid_argument", "the request ends in the middle of a message")


def decode(message: bytes, shape: type[T]) -> T:
    try:
        # Not strict: numbers may be strings in the JSON of Protocol Buffers.
        return msgspec.json.decode(message or b"{}", type=shape, strict=False)
    except msgspec.DecodeError as error:
        raise RpcError("invalid_argument", str(error)) from None
