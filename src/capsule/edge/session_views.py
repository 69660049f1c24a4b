"""What clients of sessions get, as types: the fields that they were promised first."""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET, UnsetType

from capsule.chain import Texts
from capsule.edge import views as v
from capsule.edge.contexts import RunErrorView, ShownView
from capsule.edge.text import show
from capsule.model import FileStat
from capsule.sessions.execution import Logged
from capsule.sessions.records import Artifact, Executed, Kept, Session, Skipped
from capsule.sessions.sessions import Counts


class StartedSessionView(v.View, frozen=True, kw_only=True):
    """Of a session that runs: these four, and no more."""

    session_id: str
    sandbox_id: str
    provider: str
    url: str

    @classmethod
    def of(cls, session: Session, base: str) -> StartedSessionView:
        return cls(
            session_id=session.id,
            sandbox_id=session.sandbox_id,
            provider=session.provider,
            url=sandbox_url(base, session),
        )


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def sandbox_url(base: str, session: Session) -> str:
    """ "" where there is no sandbox, or no server."""
    return f"{base}/v1/sandboxes/{session.sandbox_id}" if base and session.sandbox_id else ""


class WorkspaceView(v.View, frozen=True, kw_only=True):
    kept: str
    at: datetime | None
    size: int
    not_kept: tuple[str, ...]

    @classmethod
    def of(cls, kept: Kept | None) -> WorkspaceView:
        if kept is None:
            return cls(kept="none", at=None, size=0, not_kept=("files", "processes", "variables"))
        return cls(kept=kept.how, at=_moment(kept.at), size=kept.size, not_kept=kept.not_kept)


class SessionStateView(v.View, frozen=True, kw_only=True):
    session_id: str
    sandbox_id: str
    provider: str
    url: str
    state: str
    environment: str
    template: str
    agent: str
    created_at: datetime
    active_at: datetime
    idle_timeout_ms: int
    executions: int
    artifacts: int
    reason: str
    metadata: Mapping[str, str]
    sandboxes: tuple[str, ...]
    workspace: WorkspaceView

    @classmethod
    def of(cls, session: Session, counts: Counts, base: str) -> SessionStateView:
        return cls(
            session_id=session.id,
            sandbox_id=session.sandbox_id,
            provider=session.provider,
            url=sandbox_url(base, session),
            state=session.phase,
            environment=session.environment,
            template=session.template,
            agent=session.agent,
            created_at=session.created_at,
            active_at=session.active_at,
            idle_timeout_ms=round(session.idle_timeout * 1000),
            executions=counts.executions,
            artifacts=counts.artifacts,
            reason=session.reason,
            metadata=session.metadata,
            sandboxes=session.sandboxes,
            workspace=WorkspaceView.of(session.kept),
        )


class SessionsView(v.View, frozen=True, kw_only=True):
    sessions: list[SessionStateView]


class DeletedSessionView(v.View, frozen=True, kw_only=True):
    deleted: bool
    session_id: str
    kept: tuple[str, ...]  # what of it can still be read


class ArtifactView(v.View, frozen=True, kw_only=True):
    id: str
    name: str
    mime: str
    size: int
    sha256: str
    source: str
    created_at: datetime
    url: str

    @classmethod
    def of(cls, artifact: Artifact, session_id: str, base: str) -> ArtifactView:
        return cls(
            id=artifact.id,
            name=artifact.name,
            mime=artifact.mime,
            size=artifact.size,
            sha256=artifact.sha256,
            source=artifact.source,
            created_at=artifact.created_at,
            url=f"{base}/api/sessions/{session_id}/artifacts/{artifact.id}",
        )


class ArtifactsView(v.View, frozen=True, kw_only=True):
    artifacts: list[ArtifactView]


class SkippedView(v.View, frozen=True, kw_only=True):
    name: str
    size: int
    reason: str

    @classmethod
    def of(cls, skipped: Skipped) -> SkippedView:
        return cls(name=skipped.name, size=skipped.size, reason=skipped.reason)


class ExecutedView(v.View, frozen=True, kw_only=True):
    """What code or a tool did. An exception is in `error`, and at the end of `stderr`."""

    stdout: str
    stderr: str
    results: list[ShownView]
    artifacts: list[ArtifactView]
    status: str
    exit_code: int | None
    error: RunErrorView | None
    reason: str
    duration_ms: float
    execution: int
    stdout_truncated: bool
    stderr_truncated: bool
    skipped: list[SkippedView]

    @classmethod
    def of(cls, done: Executed, session_id: str, base: str) -> ExecutedView:
        did = done.outcome
        return cls(
            stdout=show(did.stdout, "text"),
            stderr=show(did.stderr, "text"),
            results=[ShownView.of(each) for each in did.results],
            artifacts=[ArtifactView.of(each, session_id, base) for each in done.artifacts],
            status=did.status,
            exit_code=did.exit_code,
            error=RunErrorView.of(did.error) if did.error else None,
            reason=did.reason,
            duration_ms=round(did.duration_ms, 3),
            execution=done.number,
            stdout_truncated=did.stdout_truncated,
            stderr_truncated=did.stderr_truncated,
            skipped=[SkippedView.of(each) for each in done.skipped],
        )


class SessionFileView(v.View, frozen=True, kw_only=True):
    name: str
    path: str
    type: str
    size: int
    modified_at: datetime

    @classmethod
    def of(cls, stat: FileStat, path: str) -> SessionFileView:
        return cls(
            name=_readable(stat.name or posixpath.basename(path)),
            path=_readable(path),
            type=stat.type,
            size=stat.size,
            modified_at=_moment(stat.mtime),
        )


def _readable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class SessionFilesView(v.View, frozen=True, kw_only=True):
    """A folder, or one file with its content."""

    session_id: str
    path: str
    files: list[SessionFileView]
    truncated: bool = False
    content: str | UnsetType = UNSET
    encoding: str | UnsetType = UNSET


def content_of(data: bytes) -> tuple[str, str]:
    """As text where it is text; and how it is written."""
    try:
        return data.decode("utf-8"), "text"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode("ascii"), "base64"


class WrittenFileView(v.View, frozen=True, kw_only=True):
    path: str
    size: int


class WrittenFilesView(v.View, frozen=True, kw_only=True):
    session_id: str
    files: list[WrittenFileView]


class LoggedView(v.View, frozen=True, kw_only=True):
    execution: int
    seq: int
    hash: str
    prev: str
    kind: str
    actor: str
    tool: str
    language: str
    sandbox_id: str
    started_at: str
    duration_ms: float
    status: str
    exit_code: int | None
    reason: str
    error: str
    command: str | None  # None: removed since
    stdout: str | None
    stderr: str | None
    command_bytes: int
    stdout_bytes: int
    stderr_bytes: int
    stdout_truncated: bool
    stderr_truncated: bool
    results: int
    artifacts: list[dict[str, Any]]

    @classmethod
    def of(cls, logged: Logged) -> LoggedView:
        own = {"execution", "seq", "hash", *Texts._fields}
        said = {
            name: logged.said.get(name, "") for name in cls.__struct_fields__ if name not in own
        }
        texts: dict[str, Any] = {name: _text(text) for name, text in logged.texts._asdict().items()}
        return cls(execution=logged.number, seq=logged.seq, hash=logged.hash, **texts, **said)


def _text(kept: bytes | None) -> str | None:
    return None if kept is None else show(kept, "text")


class LogView(v.View, frozen=True, kw_only=True):
    executions: list[LoggedView]
