"""What callers give: checked before anything is sent, and named in errors as they wrote it.

The wire has words of its own (`ttl_ms`, `limits.memory`). Whoever wrote `ttl=1e9` reads about
`ttl=1e9`, whether this side or the server found it wrong.
"""

from __future__ import annotations

import math
import numbers
import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from .errors import CapsuleError, InvalidError

RemotePath = str | bytes | PurePosixPath  # bytes, or surrogate escapes, where a name is not UTF-8

WORKSPACE = "/workspace"
LONGEST = 366 * 24 * 3600  # seconds; the server has limits of its own, this keeps nonsense out
_MILLIS = re.compile(r"^[0-9]+ is out of range, allowed: ([0-9]+) to ([0-9]+)$")
_OF_THE_WIRE = {"from": "source", "to": "target"}


def brief(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write out an int of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def wrong(name: str, value: Any, verdict: str, *, hint: str | None = None) -> InvalidError:
    return InvalidError(f"{name}={brief(value)} {verdict}", hint=hint, field=name, value=value)


def number(name: str, value: Any, what: str = "a number") -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong(name, value, f"is not {what}")
    if value != value or value in (math.inf, -math.inf):
        raise wrong(name, value, f"is not {what}")
    return value  # type: ignore[return-value]  # as it is: a huge int is no float


def seconds(name: str, value: Any, *, least: float = 0.001) -> float:
    """A time in seconds, which must end some day."""
    given = number(name, value, "a number of seconds")
    if not least <= given <= LONGEST:
        raise wrong(name, value, f"is out of range, allowed: {least:g} to {LONGEST} seconds")
    return given


def millis(name: str, value: Any, *, least: float = 0.001) -> int:
    return round(seconds(name, value, least=least) * 1000)


def whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, value, f"is out of range, allowed: {low} to {high}")
    return value


def mode_digits(mode: Any) -> str:
    """A file's mode as the wire has it: 0o644 → "0644"."""
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise wrong("mode", mode, "is no file mode, allowed: 0o000 to 0o7777")
    return f"{mode:04o}"


def path_bytes(path: Any, name: str = "path") -> bytes:
    """A path in the sandbox, exactly; relative ones start at the workspace."""
    if isinstance(path, PurePosixPath):
        path = str(path)
    if not isinstance(path, str | bytes):
        raise wrong(name, path, "is no path", hint="give str, bytes or PurePosixPath")
    if not path:
        raise wrong(name, path, "is empty")
    try:
        return path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise wrong(name, path, "has a lone surrogate") from None


def absolute(path: bytes) -> bytes:
    return posixpath.normpath(posixpath.join(WORKSPACE.encode(), path))


def shown(path: bytes) -> str:
    """For people, and as the server shows it: what is not UTF-8 becomes U+FFFD."""
    return path.decode("utf-8", "replace")


def name_as_given(
    error: CapsuleError, arguments: Mapping[str, Any], wire: Mapping[str, str] = _OF_THE_WIRE
) -> None:
    """Let an error about a field of the wire name the argument that was given, with its value."""
    field = error.details.get("field")
    if not isinstance(field, str) or not error.message.startswith(f"{field}: "):
        return
    name = wire.get(field, field).removeprefix("limits.")
    name = name.removesuffix("_ms").removesuffix("_base64")
    if name not in arguments:
        return
    value, problem = arguments[name], error.message[len(field) + 2 :]
    if field.endswith("_ms"):
        problem = _MILLIS.sub(_in_seconds, problem)
    error.message = f"{name}={brief(value)}{_verdict(problem, value)}"
    error.args = (error.message,)
    error.details |= {"field": name, "value": value}


def _in_seconds(found: re.Match[str]) -> str:
    low, high = (f"{int(millis) / 1000:.3f}".rstrip("0").rstrip(".") for millis in found.groups())
    return f" is out of range, allowed: {low} to {high} seconds"


def _verdict(problem: str, value: Any) -> str:
    """What the server says of a value, without the value, which it may show in its own way."""
    ways = [brief(value)]
    if isinstance(value, int) and abs(value) < 2**53:
        ways.append(repr(float(value)))
    elif isinstance(value, bytes | PurePosixPath):
        ways.append(brief(os.fsdecode(value)))
    for way in ways:
        if problem.startswith(f"{way} "):
            return problem[len(way) :]
    return problem if problem.startswith(" ") else f": {problem}"
