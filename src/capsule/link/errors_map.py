"""What the agent's error codes mean to a caller, in one table."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from capsule import surroundings
from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InternalError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    TooLargeError,
    UnavailableError,
    WrongStateError,
)

AGENT_ERRORS: Mapping[str, type[CapsuleError]] = {
    "invalid": InvalidError,
    "not_found": NotFoundError,
    "exists": ConflictError,
    "denied": ForbiddenError,
    "not_a_directory": InvalidError,
    "is_a_directory": InvalidError,
    "not_empty": ConflictError,
    "no_space": NoSpaceError,
    "too_large": TooLargeError,
    "read_only": ForbiddenError,
    "conflict": ConflictError,
    "busy": ConflictError,
    "frozen": WrongStateError,
    "limit": CapacityError,
    "unsupported": NotSupportedError,
    "refused": UnavailableError,
    "protocol": InternalError,  # the agent did not understand us: our bug, not the user's
    "version": UnavailableError,
    "gone": GoneError,
    "internal": InternalError,
}

_HINTS: Mapping[str, str] = {
    "not_empty": "pass recursive to remove a directory with what is in it",
    "no_space": "remove files in the sandbox, or create one with a larger disk",
    "frozen": "resume the sandbox first",
    "limit": "wait for processes in the sandbox to end, or kill an exec",
    "refused": "start the server inside first, and listen on 127.0.0.1",
    "version": "the sandbox was made by another version of Capsule; create a new one",
}


def to_error(body: Mapping[str, Any], **context: Any) -> CapsuleError:
    """The exception for an ERROR frame; `context` (path, exec_id …) goes into its details."""
    code = body.get("code")
    code = code if isinstance(code, str) and code in AGENT_ERRORS else "internal"
    number = body.get("errno")
    stage = body.get("stage")
    details: dict[str, Any] = {"cause": code}
    if isinstance(stage, str) and stage:
        details["stage"] = printable(stage)
    if isinstance(number, int) and number in errno.errorcode:
        details["errno"] = errno.errorcode[number]
    details.update({key: printable(value) for key, value in context.items() if value is not None})
    message = body.get("message")
    text = printable(message) if isinstance(message, str) and message else f"agent said {code}"
    if (path := details.get("path")) and f": {path}" not in text:
        text = f"{text[:1].lower()}{text[1:]}: {path}"  # "no such file or directory: a.txt"
        if target := details.get("target"):  # either may be the cause
            text += f" to {target}"
    full = surroundings.exhausted() if code == "limit" else ""
    return AGENT_ERRORS[code](text, hint=full or _HINTS.get(code), **details)


def printable(value: Any) -> Any:
    """Text fit for a log line or a JSON answer, even when it names bytes that are no UTF-8."""
    if isinstance(value, str):
        return value[:4096].encode("utf-8", "backslashreplace").decode()
    return value
