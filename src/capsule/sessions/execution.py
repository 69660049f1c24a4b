"""An execution in the records: under way, and over, with all that the log says of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from capsule import chain
from capsule.chain import Texts
from capsule.sessions.records import Artifact, Outcome, Session, Task


class Running(NamedTuple):
    """An execution under way."""

    id: int
    session: str  # uid
    sandbox: str
    started: float
    task: Task


class Place(NamedTuple):
    """Of an execution in the log."""

    number: int  # within its session
    seq: int
    hash: str


class Logged(NamedTuple):
    """An execution that is over."""

    seq: int
    number: int
    hash: str
    said: dict[str, Any]
    texts: Texts


def said_of(
    session: Session,
    running: Running,
    outcome: Outcome,
    artifacts: tuple[Artifact, ...],
    texts: Texts,
) -> dict[str, Any]:
    """All that the log says of an execution, but its place."""
    task = running.task
    return {
        "tenant": session.tenant,
        "session": session.uid,
        "session_id": session.id,
        "sandbox_id": running.sandbox,
        "kind": task.kind,
        "actor": task.actor,
        "tool": task.tool,
        "language": task.language,
        "started_at": chain.stamp(running.started),
        "duration_ms": round(outcome.duration_ms, 3),
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "error": f"{outcome.error.name}: {outcome.error.value}"[:500] if outcome.error else "",
        "command_bytes": len(as_bytes(task.command)),
        "stdout_bytes": len(outcome.stdout),
        "stderr_bytes": len(outcome.stderr),
        "stdout_truncated": outcome.stdout_truncated,
        "stderr_truncated": outcome.stderr_truncated,
        "results": len(outcome.results),
        "artifacts": [
            {"name": each.name, "sha256": each.sha256, "size": each.size} for each in artifacts
        ],
        **{f"{name}_sha256": chain.digest(text or b"") for name, text in texts._asdict().items()},
    }


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
