"""The agent's JSON turned into the model's values. A field of the wrong type is a ProtocolError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from capsule.link.protocol import ProtocolError
from capsule.model import ExecId, ExecInfo, Exit, FileStat, Reason, Resolved, Usage

T = TypeVar("T")
Body = Mapping[str, Any]

_INF = float("inf")
_REASONS = {reason.value: reason for reason in Reason}


def field(body: Body, name: str, kind: type[T]) -> T:
    value = body.get(name)
    # `type is` and not isinstance: a bool must not pass for a number.
    if type(value) is kind:
        return value
    raise ProtocolError(f"agent sent a bad {name!r}: {str(value)[:100]!r}, not {kind.__name__}")


def number(body: Body, name: str) -> float:
    value = body.get(name)
    if (type(value) is int or type(value) is float) and -_INF < value < _INF:
        return value
    raise ProtocolError(f"agent sent a bad {name!r}: {str(value)[:100]!r}, not a number")


def _optional(body: Body, name: str) -> int | None:
    return None if body.get(name) is None else field(body, name, int)


def exit_of(body: Body) -> Exit:
    reason = _REASONS.get(field(body, "reason", str))
    if reason is None:
        raise ProtocolError(f"agent sent an unknown reason: {body['reason'][:100]!r}")
    return Exit(
        reason=reason,
        exit_code=field(body, "exit_code", int),
        signal=field(body, "signal", int),
        duration_ms=number(body, "duration_ms"),
        cpu_ms=number(body, "cpu_ms"),
        max_rss_bytes=field(body, "max_rss_bytes", int),
        stdout_bytes=field(body, "stdout_bytes", int),
        stderr_bytes=field(body, "stderr_bytes", int),
        stdout_truncated=field(body, "stdout_truncated", bool),
        stderr_truncated=field(body, "stderr_truncated", bool),
    )


def exec_info(body: Any) -> ExecInfo:
    body = _object(body)
    argv = field(body, "argv", list)
    if not all(isinstance(word, str) for word in argv):
        raise ProtocolError("agent sent a bad 'argv'")
    ended = body.get("exit")
    return ExecInfo(
        id=ExecId(field(body, "id", str)),
        pid=field(body, "pid", int),
        argv=tuple(argv),
        tty=field(body, "tty", bool),
        running=field(body, "running", bool),
        started_ms_ago=number(body, "started_ms_ago"),
        exit=None if ended is None else exit_of(_object(ended)),
        stdout_bytes=field(body, "stdout_bytes", int),
        stderr_bytes=field(body, "stderr_bytes", int),
    )


def file_stat(body: Any) -> FileStat:
    body = _object(body)
    target = body.get("target")
    return FileStat(
        name=field(body, "name", str),
        path=field(body, "path", str),
        type=field(body, "type", str),
        size=field(body, "size", int),
        mode=field(body, "mode", int),
        mtime=number(body, "mtime"),
        uid=field(body, "uid", int),
        gid=field(body, "gid", int),
        target=None if target is None else field(body, "target", str),
        **(_detail(body) if "owner" in body else {}),
    )


def _detail(body: Body) -> dict[str, Any]:
    metadata = field(body, "metadata", dict) if "metadata" in body else {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ProtocolError("agent sent a bad 'metadata'")
    return {
        "mtime_ns": field(body, "mtime_ns", int),
        "owner": field(body, "owner", str),
        "group": field(body, "group", str),
        "resolved": None if body.get("resolved") is None else _resolved(body["resolved"]),
        "metadata": metadata,
    }


def _resolved(body: Any) -> Resolved:
    body = _object(body)
    return Resolved(
        path=field(body, "path", str),
        type=field(body, "type", str),
        mode=field(body, "mode", int),
        size=field(body, "size", int),
    )


def usage(body: Body) -> Usage:
    return Usage(
        cpu_ms=None if body.get("cpu_ms") is None else number(body, "cpu_ms"),
        memory_bytes=_optional(body, "memory_bytes"),
        memory_peak_bytes=_optional(body, "memory_peak_bytes"),
        processes=_optional(body, "processes"),
        io_read_bytes=_optional(body, "io_read_bytes"),
        io_write_bytes=_optional(body, "io_write_bytes"),
        disk_bytes=_optional(body, "disk_bytes"),
        inodes=_optional(body, "inodes"),
        oom_kills=_optional(body, "oom_kills"),
        source=field(body, "source", str),
    )


def _object(value: Any) -> Body:
    if not isinstance(value, dict):
        raise ProtocolError(f"agent sent {type(value).__name__} where an object belongs")
    return value
