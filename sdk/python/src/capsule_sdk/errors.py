"""What this client raises. The names are the server's own; the class says what to do next.

    CapsuleError
    ├── InvalidError           the request is wrong; change it
    ├── UnauthenticatedError   no key, or an unknown one
    ├── ForbiddenError         known, but not allowed (also: the sandbox's user may not)
    ├── NotFoundError          no such sandbox, exec, file, template
    ├── ConflictError          it exists already, or the same key was used for something else
    ├── WrongStateError        it exists, but not in a state that allows this
    ├── GoneError              it existed, and is over
    ├── TooLargeError          over a size limit; `details` has the limit
    ├── CapacityError          full right now; retry after `retry_after` seconds
    ├── NotSupportedError      this provider or host cannot do it
    ├── UnavailableError       the server, or a part it depends on, does not answer
    ├── NoSpaceError           the disk is full
    ├── InternalError          a bug of the server
    └── ExecFailedError        only from `result.check()`: the program itself failed

A code this version does not know becomes a plain CapsuleError carrying it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._runs import RunResult
    from .values import Exit


class CapsuleError(Exception):
    code: str = "internal"

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = details

    def __str__(self) -> str:
        return f"{self.message}; hint: {self.hint}" if self.hint else self.message


class InvalidError(CapsuleError):
    code = "invalid"


class UnauthenticatedError(CapsuleError):
    code = "unauthenticated"


class ForbiddenError(CapsuleError):
    code = "forbidden"


class NotFoundError(CapsuleError):
    code = "not_found"


class ConflictError(CapsuleError):
    code = "conflict"


class WrongStateError(CapsuleError):
    code = "wrong_state"


class GoneError(CapsuleError):
    code = "gone"


class TooLargeError(CapsuleError):
    code = "too_large"


class CapacityError(CapsuleError):
    code = "capacity"

    @property
    def retry_after(self) -> float:
        value = self.details.get("retry_after", 1.0)
        return float(value) if isinstance(value, int | float) else 1.0


class NotSupportedError(CapsuleError):
    code = "unsupported"


class UnavailableError(CapsuleError):
    code = "unavailable"
    sent = True  # False: the request never left this machine, so repeating it is safe


class NoSpaceError(CapsuleError):
    code = "no_space"


class InternalError(CapsuleError):
    code = "internal"


class ExecFailedError(CapsuleError):
    code = "exec_failed"

    def __init__(self, message: str, *, result: Exit) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> Any:
        # A process pool hands exceptions over as pickles, which know nothing of keywords.
        return functools.partial(type(self), result=self.result), self.args, self.__dict__


class RunFailedError(CapsuleError):
    """A run in a context did not end well, and somebody asked with `check`."""

    code = "run_failed"

    def __init__(self, message: str, *, result: RunResult) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> Any:
        return functools.partial(type(self), result=self.result), self.args, self.__dict__


SERVER_ERRORS: tuple[type[CapsuleError], ...] = (
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

_BY_CODE = {cls.code: cls for cls in SERVER_ERRORS}


def from_json(body: Mapping[str, Any]) -> CapsuleError:
    """The exception for an error object of the server: `code`, `message`, `hint`, `details`."""
    code = str(body.get("code", "internal"))
    hint = body.get("hint")
    details = body.get("details")
    cls = _BY_CODE.get(code, CapsuleError)
    error = cls(str(body.get("message", "the server gave no reason")), hint=hint)
    error.code = code
    if isinstance(details, Mapping):
        error.details.update(details)
    return error
