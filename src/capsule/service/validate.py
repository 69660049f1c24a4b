"""What callers may ask for. Each check raises InvalidError with the value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from capsule.config import Config, check_limit
from capsule.errors import InvalidError, TooLargeError
from capsule.model import ROOT, ExecId, Limits
from capsule.settings import brief

MAX_STRING = 128 * 1024 - 1  # what the kernel takes as one argument or variable
MAX_ENV = 256 * 1024
MAX_ARGV = 512 * 1024
MAX_METADATA = 64
MAX_PATH = 4095
MAX_SIDE = 4096  # of a terminal, in characters

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_HOST = re.compile(r"(\$\{PORT\}|[A-Za-z0-9_.:\[\]-]){1,260}", re.ASCII)
_EXEC_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
SIGNALS = frozenset(
    "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM CHLD CONT STOP TSTP TTIN"
    " TTOU URG XCPU XFSZ VTALRM PROF WINCH IO SYS".split()
)


def seconds(field: str, value: Any, low: float, high: float) -> float:
    """Raises InvalidError with all of it in `details`, for edges that speak of other units."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidError(f"{field}: {brief(value)} is no number of seconds", field=field)
    if not low <= value <= high:
        raise InvalidError(
            f"{field}: {value:.15g} is out of range, allowed: {low:.15g} to {high:.15g} seconds",
            field=field,
            unit="seconds",
            value=value,
            least=low,
            most=high,
        )
    return float(value)


def count(field: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidError(
            f"{field}: {brief(value)} is out of range, allowed: {low} to {high}", field=field
        )
    return value


def screen(rows: int, cols: int) -> None:
    """The size of a terminal."""
    count("rows", rows, 1, MAX_SIDE)
    count("cols", cols, 1, MAX_SIDE)


def choice(field: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise InvalidError(
            f"{field}: {brief(value)} is not one of {', '.join(allowed)}", field=field
        )
    return value


def request_host(value: str) -> str:
    """What a program in the sandbox is told as `Host`; `${PORT}` in it is the port."""
    if value and not _HOST.fullmatch(value):
        raise InvalidError(
            f"request_host: {brief(value)} is no name of a host, with or without a port",
            field="request_host",
        )
    return value


def text(
    field: str, value: Any, *, most: int = MAX_STRING, least: int = 0, escapes: bool = False
) -> str:
    """A string that a Linux program can be given: no NUL, nothing that is not a character.

    `escapes` lets through bytes that are no UTF-8, as `surrogateescape` writes them.
    """
    if not isinstance(value, str):
        raise InvalidError(f"{field}: {brief(value)} is not a string", field=field)
    if "\0" in value:
        raise InvalidError(f"{field}: {brief(value)} has a NUL character", field=field)
    try:
        size = _size(value, "surrogateescape" if escapes else "strict")
    except UnicodeEncodeError:
        raise InvalidError(f"{field}: {brief(value)} has a lone surrogate", field=field) from None
    if size < least:
        raise InvalidError(f"{field}: is empty", field=field)
    if size > most:
        raise TooLargeError(f"{field}: {size} bytes, limit {most}", field=field, limit=most)
    return value


def _size(value: str, errors: str = "strict") -> int:
    return len(value) if value.isascii() else len(value.encode(errors=errors))


def env(variables: Mapping[str, str], field: str = "env") -> None:
    total = 0
    for name, value in variables.items():
        text(f"{field} name", name, least=1, most=1024)
        if "=" in name:
            raise InvalidError(f"{field}: the name {brief(name)} has a '='", field=field)
        text(f"{field}.{name}", value, most=MAX_STRING - _size(name) - 1)
        total += _size(name) + _size(value) + 2
    if total > MAX_ENV:
        raise TooLargeError(f"{field}: {total} bytes, limit {MAX_ENV}", field=field, limit=MAX_ENV)


def argv(cmd: Sequence[str]) -> tuple[str, ...]:
    if isinstance(cmd, str) or not cmd:
        raise InvalidError(f"cmd: {brief(cmd)} is not a list of at least one string", field="cmd")
    if len(cmd) > 4096:
        raise TooLargeError(f"cmd: {len(cmd)} arguments, limit 4096", field="cmd", limit=4096)
    for word in cmd:
        text("cmd", word)
    text("cmd", cmd[0], least=1)
    if sum(map(_size, cmd)) > MAX_ARGV:
        raise TooLargeError(f"cmd: more than {MAX_ARGV} bytes", field="cmd", limit=MAX_ARGV)
    return tuple(cmd)


def metadata(pairs: Mapping[str, str]) -> None:
    if len(pairs) > MAX_METADATA:
        raise TooLargeError(
            f"metadata: {len(pairs)} entries, limit {MAX_METADATA}",
            field="metadata",
            limit=MAX_METADATA,
        )
    for name, value in pairs.items():
        text("metadata name", name, least=1, most=128)
        text(f"metadata.{name}", value, most=4096)


def key(value: str | None) -> str | None:
    return None if value is None else text("idempotency_key", value, least=1, most=256)


def name(field: str, value: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidError(
            f"{field}: {brief(value)} is no name, allowed: 1 to 64 letters, digits, '_', '.', '-'",
            field=field,
        )
    return value


def exec_id(value: str) -> ExecId:
    if not isinstance(value, str) or not _EXEC_ID.fullmatch(value):
        raise InvalidError(
            f"exec_id: {brief(value)} is no exec's id",
            hint="list the execs of this sandbox",
            field="exec_id",
        )
    return ExecId(value)


def signal(value: str) -> str:
    known = value.upper().removeprefix("SIG") if isinstance(value, str) else ""
    if known not in SIGNALS:
        raise InvalidError(
            f"signal: {brief(value)} is unknown", hint="take a name such as TERM", field="signal"
        )
    return known


def user(value: str | None, own: str) -> str:
    """Whom a program is to be, as ExecRequest has it; `own` is the name of the sandbox's user."""
    if value is None or value == own:
        return ""
    if value != ROOT:
        raise InvalidError(
            f"user: {brief(value)} is unknown in this sandbox, there are {own} and {ROOT}",
            field="user",
        )
    return ROOT


def path(value: str, field: str = "path") -> str:
    """Absolute, or relative to /workspace. Where it leads is decided inside the sandbox."""
    text(field, value, least=1, most=MAX_PATH, escapes=True)
    if ".." in value.split("/"):
        raise InvalidError(
            f"{field}: {brief(value)} has a '..' component",
            hint="name the file by its absolute path",
            field=field,
        )
    return value


def limits(overrides: Mapping[str, Any] | None, base: Limits, config: Config) -> Limits:
    """A template's limits with a caller's overrides. What the template gives is capped silently:
    whoever set max_limits meant it."""
    most = config.max_limits
    merged = {
        name: min(getattr(base, name), getattr(most, name)) for name in Limits.__dataclass_fields__
    }
    for field, value in (overrides or {}).items():
        merged[field] = check_limit(field, value, most)
    return Limits(**merged)
