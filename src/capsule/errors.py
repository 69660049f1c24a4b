"""Everything Capsule raises on purpose. What a user's program did is never in here: that is data.

    CapsuleError
    ├── InvalidError           400  the request is wrong; change it
    ├── UnauthenticatedError   401  no key, or an unknown one
    ├── ForbiddenError         403  known, but not allowed (also: the sandbox's user may not)
    ├── NotFoundError          404  no such sandbox, exec, file, template
    ├── ConflictError          409  it exists already, or the same key was used for something else
    ├── WrongStateError        409  it exists, but not in a state that allows this
    ├── GoneError              410  it existed, and is over
    ├── TooLargeError          413  over a size limit; `details` has the limit
    ├── CapacityError          429  full right now; retry after `retry_after` seconds
    ├── NotSupportedError      501  this provider or host cannot do it
    ├── UnavailableError       503  a part we depend on does not answer
    ├── NoSpaceError           507  the disk (the sandbox's or ours) is full
    └── InternalError          500  a bug of ours

The class says what the caller should do next, `code` is its stable name for machines and metrics,
`message` is for a person (what failed, the value, the limit), `hint` is the next step, `details`
are JSON values.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CapsuleError(Exception):
    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    rpc_code: ClassVar[int] = -32000

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = details

    def __str__(self) -> str:
        return f"{self.message}; hint: {self.hint}" if self.hint else self.message

    def to_json(self) -> dict[str, Any]:
        """The only form in which an error crosses the wire."""
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.hint:
            body["hint"] = self.hint
        if self.details:
            body["details"] = self.details
        return body


class InvalidError(CapsuleError):
    code = "invalid"
    http_status = 400
    rpc_code = -32602


class UnauthenticatedError(CapsuleError):
    code = "unauthenticated"
    http_status = 401
    rpc_code = -32001


class ForbiddenError(CapsuleError):
    code = "forbidden"
    http_status = 403
    rpc_code = -32003


class NotFoundError(CapsuleError):
    code = "not_found"
    http_status = 404
    rpc_code = -32004


class ConflictError(CapsuleError):
    code = "conflict"
    http_status = 409
    rpc_code = -32009


class WrongStateError(CapsuleError):
    code = "wrong_state"
    http_status = 409
    rpc_code = -32010


class GoneError(CapsuleError):
    code = "gone"
    http_status = 410
    rpc_code = -32011


class TooLargeError(CapsuleError):
    code = "too_large"
    http_status = 413
    rpc_code = -32013


class CapacityError(CapsuleError):
    code = "capacity"
    http_status = 429
    rpc_code = -32029

    def __init__(
        self, message: str, *, retry_after: float = 1.0, hint: str | None = None, **details: Any
    ) -> None:
        super().__init__(message, hint=hint, retry_after=retry_after, **details)
        self.retry_after = retry_after


class NotSupportedError(CapsuleError):
    code = "unsupported"
    http_status = 501
    rpc_code = -32051


class UnavailableError(CapsuleError):
    code = "unavailable"
    http_status = 503
    rpc_code = -32053


class NoSpaceError(CapsuleError):
    code = "no_space"
    http_status = 507
    rpc_code = -32057


class InternalError(CapsuleError):
    code = "internal"
    http_status = 500
    rpc_code = -32603


ALL_ERRORS: tuple[type[CapsuleError], ...] = (
    InvalidError,
    UnauthenticatedError,
    ForbiddenError,
    NotFoundError,
    ConflictError,
    WrongStateError,
    GoneError,
    TooLargeError,
    CapacityError,
    NotSupportedError,
    UnavailableError,
    NoSpaceError,
    InternalError,
)
