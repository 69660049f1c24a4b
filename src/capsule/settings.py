"""What a setting may be: its kind, its range, and how its text is read. `config.py` declares them.

The `about` of a setting is the metadata of a dataclass field; `check` brings a value from
anywhere (YAML, the environment, code) into its own type, or says in one line what is wrong with
it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from capsule.errors import InvalidError
from capsule.model import GIB, MIB, Isolation, Limits

About = Mapping[str, Any]

_SIZES = {
    **{"": 1, "b": 1, "k": 1024, "m": MIB, "g": GIB, "t": 1024 * GIB},
    **{"kib": 1024, "mib": MIB, "gib": GIB, "tib": 1024 * GIB},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_TIMES = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)

_KINDS = {
    "integer": "a whole number",
    "bytes": "a size such as 1048576 or 512MiB",
    "seconds": "a time such as 30, 500ms or 10m",
    "number": "a number",
}


def about(
    kind: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    optional: bool = False,
    secret: bool = False,
) -> About:
    return {
        "kind": kind,
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "optional": optional,
        "secret": secret,
    }


def check(name: str, about: About, value: Any) -> Any:
    """The value in its own type and within its range. Raises InvalidError."""
    if value is None and about["optional"]:
        return None
    try:
        match about["kind"]:
            case "list":
                return _strings(value)
            case "path":
                return Path(_text(value)).expanduser().absolute()
            case "text":
                return _text(value)
            case "choice":
                return _choice(value, about["choices"])
            case "limits":
                return _limits(value)
            case kind:
                return _number(value, kind, about["low"], about["high"])
    except (ValueError, RuntimeError) as error:  # RuntimeError: a `~` without a home
        shown = "the value" if about["secret"] else brief(value)
        raise InvalidError(f"{name}: {shown} {error}", field=name) from None


def unknown(key: str, known: Iterable[str], what: str) -> InvalidError:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
    hint = f"did you mean {near[0]}?" if near else None
    return InvalidError(f"unknown {what}: {brief(key)}", hint=hint, field=key)


def brief(value: Any) -> str:
    """A value as an error message shows it: one line, never long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_bytes(text: str) -> int:
    """`1048576`, `512MiB`, `1.5g`. Raises ValueError."""
    return int(_quantity(text, _SIZES))


def parse_seconds(text: str) -> float:
    """`30`, `0.5`, `500ms`, `10m`, `24h`. Raises ValueError."""
    return float(_quantity(text, _TIMES))


def _quantity(text: str, units: Mapping[str, float]) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        raise ValueError(text)
    amount = float(found[1]) if "." in found[1] else int(found[1])
    return amount * units[found[2].lower()]


def _text(value: Any) -> str:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("is not a text of at least one character")
    return str(value)


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(x, str) and x for x in value):
        raise ValueError("is not a list of texts")
    return tuple(value)


def _choice(value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"is not one of {', '.join(choices)}")
    return Isolation(value) if value in tuple(Isolation) else value


def _limits(value: Any) -> Limits:
    if not isinstance(value, Limits):
        raise ValueError("is not a mapping of limits")
    return value


def _number(value: Any, kind: str, low: float | None, high: float | None) -> int | float:
    if isinstance(value, str):
        value = _parse(value, kind)
    whole = kind in ("integer", "bytes")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"is not {_KINDS[kind]}")
    if value != value or (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"is out of range, allowed: {_range(low, high)}")
    return value if whole else float(value)


def _parse(text: str, kind: str) -> int | float:
    try:
        match kind:
            case "bytes":
                return parse_bytes(text)
            case "seconds":
                return parse_seconds(text)
            case "integer":
                return int(text)
            case _:
                return float(text)
    except ValueError:
        raise ValueError(f"is not {_KINDS[kind]}") from None


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at most {high}"
    return f"at least {low}" if high is None else f"{low} to {high}"
