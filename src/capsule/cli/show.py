"""What a person sees: colours and bars on a terminal, plain columns or JSON anywhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

RED, GREEN, YELLOW, DIM, BOLD = "31", "32", "33", "2", "1"


def colourful(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: IO[str] | None = None) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colourful(stream or sys.stdout) else text


def as_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(_dump(value, indent=2 if sys.stdout.isatty() else None))


def _dump(value: Any, indent: int | None = None) -> str:
    text = json.dumps(value, indent=indent, default=str, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a file name that is not UTF-8, or a terminal that knows no such
        return json.dumps(value, indent=indent, default=str)
    return text


def note(text: str) -> None:
    """For the person, not for a pipe: on stderr, and only if somebody is looking."""
    if sys.stderr.isatty():
        print(paint(text, DIM, sys.stderr), file=sys.stderr)


def problem(
    message: str,
    *,
    hint: str | None,
    code: str,
    details: Mapping[str, Any] | None = None,
    as_json: bool = False,
) -> None:
    if as_json:
        optional = {"hint": hint, "details": details}
        body = {"code": code, "message": message} | {k: v for k, v in optional.items() if v}
        print(_dump({"error": body}))
    print(f"{paint('error:', RED, sys.stderr)} {message}", file=sys.stderr)
    if hint:
        print(f"{paint('hint:', YELLOW, sys.stderr)} {hint}", file=sys.stderr)


_OPTIONS = frozenset(
    ("ttl", "idle_timeout", "timeout", "memory", "cpus", "disk", "processes", "cwd", "session")
)


def failure(error: Any, *, as_json: bool = False) -> None:
    """An error of Capsule's, in the words of the command line."""
    hint = error.hint
    if error.code == "unauthenticated":
        hint = "set CAPSULE_API_KEY to one of the server's keys, or use --api-key"
    details = {name: detail for name, detail in error.details.items() if name != "value"}
    message = in_options(error.message, details)
    problem(message, hint=hint, code=error.code, details=details, as_json=as_json)


def in_options(message: str, details: Mapping[str, Any]) -> str:
    """`limits.cpus: nan is …` and `cpus=nan is …` → `--cpus nan is …`."""
    field = str(details.get("field", "")).removeprefix("limits.")
    if field not in _OPTIONS:
        return message
    for prefix in (f"limits.{field}: ", f"{field}: ", f"{field}="):
        if message.startswith(prefix):
            return f"--{field.replace('_', '-')} {message[len(prefix) :]}"
    return message


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Aligned columns. In a pipe without decoration, so that awk and cut can take them apart."""
    if not rows:
        note(empty)
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(paint(_line([c.upper() for c in columns], widths), BOLD))
    for row in rows:
        print(_line(row, widths))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def size(count: float | None) -> str:
    """1536 → 1.5 KiB."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return (
                f"{value:.0f} {unit}"
                if unit == "B" or value == int(value)
                else f"{value:.1f} {unit}"
            )
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """90 → 1m30s."""
    left = max(0, round(seconds))
    parts = (
        (left // 86400, "d"),
        (left // 3600 % 24, "h"),
        (left // 60 % 60, "m"),
        (left % 60, "s"),
    )
    shown = [f"{n}{unit}" for n, unit in parts if n]
    return "".join(shown[:2]) or "0s"


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere. Call what it gives with each count of bytes moved."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.update(task, advance=count)


def exit_fields(exit: Any) -> dict[str, Any]:
    """How a program ended, in the words of the API."""
    body = dataclasses.asdict(exit)
    return {"exit_code": body.pop("exit_code"), "timed_out": exit.timed_out, **body}


def quiet_logs() -> None:
    """Commands talk to a person; the log of what happens below is for servers. Call it first."""
    import logging

    structlog = _import_structlog()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    structlog.configure(
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )


def _import_structlog() -> Any:
    """Without rich, which it would load for tracebacks that are never shown here: 35 ms."""
    hidden = "rich" not in sys.modules
    if hidden:
        sys.modules["rich"] = None  # type: ignore[assignment]  # the import system's "not there"
    try:
        import structlog
    finally:
        if hidden:
            del sys.modules["rich"]
    return structlog
