"""What clients get, as types: the seeds' fields first, further ones after them. One shape for every
surface.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from capsule.edge.text import is_text, show
from capsule.model import (
    ExecInfo,
    Exit,
    FileStat,
    Limits,
    Step,
    Unenforced,
    VolumeMount,
)
from capsule.providers.contract import FileChange, VolumeLook
from capsule.service import ExecResult, Sandbox, Snapshot, Volume


class View(msgspec.Struct, frozen=True, kw_only=True):
    pass


class MountView(View, frozen=True, kw_only=True):
    name: str
    path: str
    read_only: bool

    @classmethod
    def of(cls, mount: VolumeMount) -> MountView:
        return cls(name=mount.name, path=mount.path, read_only=mount.read_only)


class SandboxView(View, frozen=True, kw_only=True):
    id: str
    template: str
    created_at: datetime
    expires_at: datetime
    state: str
    provider: str
    isolation: str | None
    started: str | None
    ttl_ms: int
    idle_timeout_ms: int
    limits: Limits
    unenforced: tuple[Unenforced, ...]
    metadata: Mapping[str, str]
    reason: str
    progress: str
    about: Mapping[str, str]
    on_timeout: str
    auto_resume: bool
    snapshot: str
    checkpoint: str
    volumes: list[MountView]
    ports: str
    tenant: str
    sandbox_id: str | UnsetType = UNSET

    @classmethod
    def of(cls, sandbox: Sandbox, *, old: bool = False) -> SandboxView:
        return cls(
            id=sandbox.id,
            template=sandbox.template,
            created_at=sandbox.created_at,
            expires_at=sandbox.expires_at,
            state=sandbox.state,
            provider=sandbox.provider,
            isolation=sandbox.isolation,
            started=sandbox.started,
            ttl_ms=round(sandbox.ttl * 1000),
            idle_timeout_ms=round(sandbox.idle_timeout * 1000),
            limits=sandbox.limits,
            unenforced=sandbox.unenforced,
            metadata=sandbox.metadata,
            reason=sandbox.reason,
            progress=sandbox.progress,
            about=sandbox.about,
            on_timeout=sandbox.on_timeout,
            auto_resume=sandbox.auto_resume,
            snapshot=sandbox.snapshot,
            checkpoint=sandbox.checkpoint,
            volumes=[MountView.of(each) for each in sandbox.volumes],
            ports=sandbox.ports,
            tenant=sandbox.tenant,
            sandbox_id=sandbox.id if old else UNSET,
        )


class SandboxesView(View, frozen=True, kw_only=True):
    sandboxes: list[SandboxView]


class ForkView(View, frozen=True, kw_only=True):
    sandboxes: list[SandboxView]
    copied: tuple[str, ...] = ("files", "limits", "env", "metadata", "timeouts", "volumes")
    not_copied: tuple[str, ...] = ("processes", "contexts", "terminals", "sessions")


class SnapshotView(View, frozen=True, kw_only=True):
    name: str
    template: str
    provider: str
    created_at: datetime
    size: int
    files: int
    layers: int
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, snapshot: Snapshot) -> SnapshotView:
        return cls(
            name=snapshot.name,
            template=snapshot.template,
            provider=snapshot.provider,
            created_at=snapshot.created_at,
            size=snapshot.size,
            files=snapshot.files,
            layers=len(snapshot.layers),
            metadata=snapshot.metadata,
        )


class SnapshotsView(View, frozen=True, kw_only=True):
    snapshots: list[SnapshotView]


class StepView(View, frozen=True, kw_only=True):
    step: int
    exec_id: str
    cmd: str
    created_at: datetime
    size: int
    copied: int

    @classmethod
    def of(cls, step: Step) -> StepView:
        return cls(
            step=step.number,
            exec_id=step.exec_id,
            cmd=step.cmd,
            created_at=datetime.fromtimestamp(step.created, UTC),
            size=_size_of(step),
            copied=step.copied,
        )


def _size_of(step: Step) -> int:
    if step.size is not None:
        return step.size
    return step.layers[0].size if step.layers else 0


class StepsView(View, frozen=True, kw_only=True):
    steps: list[StepView]


class FileChangeView(View, frozen=True, kw_only=True):
    path: str
    change: str
    type: str
    size: int
    path_base64: str | UnsetType = UNSET

    @classmethod
    def of(cls, change: FileChange) -> FileChangeView:
        path = change.path.decode("utf-8", "surrogateescape")
        return cls(
            path=show(change.path, "text"),
            change=change.change,
            type=change.type,
            size=change.size,
            path_base64=UNSET if is_text(path) else _raw(path),
        )


class DiffView(View, frozen=True, kw_only=True):
    changes: list[FileChangeView]


class VolumeView(View, frozen=True, kw_only=True):
    name: str
    provider: str
    created_at: datetime
    metadata: Mapping[str, str]
    size: int | None
    used: int | None
    problem: str | None

    @classmethod
    def of(cls, volume: Volume, look: VolumeLook) -> VolumeView:
        return cls(
            size=volume.size,
            used=look.used,
            problem=look.problem,
            name=volume.name,
            provider=volume.provider,
            created_at=volume.created_at,
            metadata=volume.metadata,
        )


class VolumesView(View, frozen=True, kw_only=True):
    volumes: list[VolumeView]


class DeletedView(View, frozen=True, kw_only=True):
    deleted: bool = True


class ExitView(View, frozen=True, kw_only=True):
    """How a program ended."""

    exit_code: int
    timed_out: bool
    duration_ms: int
    reason: str
    signal: int
    stdout_truncated: bool
    stderr_truncated: bool
    stdout_bytes: int
    stderr_bytes: int
    cpu_ms: float
    max_rss_bytes: int
    exec_id: str

    @classmethod
    def of(cls, exec_id: str, exit: Exit) -> ExitView:
        return cls(**_exit_fields(exec_id, exit))


class ExecView(View, frozen=True, kw_only=True):
    """How a program ended, and what it wrote."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    duration_ms: int
    reason: str
    signal: int
    stdout_truncated: bool
    stderr_truncated: bool
    stdout_bytes: int
    stderr_bytes: int
    cpu_ms: float
    max_rss_bytes: int
    exec_id: str

    @classmethod
    def of(cls, result: ExecResult, encoding: str = "text") -> ExecView:
        return cls(
            stdout=show(result.stdout, encoding),
            stderr=show(result.stderr, encoding),
            **_exit_fields(result.id, result.exit),
        )


def _exit_fields(exec_id: str, exit: Exit) -> dict[str, Any]:
    return {
        "exit_code": exit.exit_code,
        "timed_out": exit.timed_out,
        "duration_ms": round(exit.duration_ms),
        "reason": exit.reason,
        "signal": exit.signal,
        "stdout_truncated": exit.stdout_truncated,
        "stderr_truncated": exit.stderr_truncated,
        "stdout_bytes": exit.stdout_bytes,
        "stderr_bytes": exit.stderr_bytes,
        "cpu_ms": exit.cpu_ms,
        "max_rss_bytes": exit.max_rss_bytes,
        "exec_id": exec_id,
    }


class OldExecView(View, frozen=True, kw_only=True):
    """`sandbox.exec` of the older interface: these three, and no more."""

    stdout: str
    stderr: str
    exit_code: int


class BatchView(View, frozen=True, kw_only=True):
    results: list[ExecView]
    stopped: bool  # a command failed, and those after it were not run


class StartedView(View, frozen=True, kw_only=True):
    exec_id: str
    pid: int


class ExecInfoView(View, frozen=True, kw_only=True):
    exec_id: str
    pid: int
    cmd: tuple[str, ...]
    tty: bool
    running: bool
    started_ms_ago: float
    stdout_bytes: int
    stderr_bytes: int
    exit: ExitView | None
    stdout: str | UnsetType = UNSET
    stderr: str | UnsetType = UNSET
    stdout_offset: int | UnsetType = UNSET  # how far `stdout` goes; the rest is in the stream
    stderr_offset: int | UnsetType = UNSET

    @classmethod
    def of(cls, info: ExecInfo) -> ExecInfoView:
        return cls(
            exec_id=info.id,
            pid=info.pid,
            cmd=info.argv,
            tty=info.tty,
            running=info.running,
            started_ms_ago=info.started_ms_ago,
            stdout_bytes=info.stdout_bytes,
            stderr_bytes=info.stderr_bytes,
            exit=ExitView.of(info.id, info.exit) if info.exit else None,
        )


class ExecsView(View, frozen=True, kw_only=True):
    execs: list[ExecInfoView]


class GapView(View, frozen=True, kw_only=True):
    """Bytes `start` up to `end` of a stream are no longer kept."""

    stream: str
    start: int
    end: int


class AttachView(View, frozen=True, kw_only=True):
    """Output from the offsets asked for; ask again with `stdout_offset` and `stderr_offset`."""

    stdout: str
    stderr: str
    stdout_offset: int
    stderr_offset: int
    running: bool
    gaps: list[GapView]
    exit: ExitView | None


class KilledView(View, frozen=True, kw_only=True):
    running: bool  # whether it had been


class SentView(View, frozen=True, kw_only=True):
    bytes: int


class DoneView(View, frozen=True, kw_only=True):
    ok: bool = True


class WrittenView(View, frozen=True, kw_only=True):
    path: str
    size: int


class ContentView(View, frozen=True, kw_only=True):
    content: str
    size: int  # of the file; `content` may be a part of it


class FileView(View, frozen=True, kw_only=True):
    name: str
    path: str
    type: str
    is_dir: bool
    size: int
    mode: int
    mtime: float
    target: str | None = None
    name_base64: str | UnsetType = UNSET  # only where the name is not UTF-8

    @classmethod
    def of(cls, stat: FileStat, path: str) -> FileView:
        return cls(
            name=stat.name,
            path=path,
            type=stat.type,
            is_dir=stat.type == "dir",
            size=stat.size,
            mode=stat.mode,
            mtime=stat.mtime,
            target=stat.target,
            name_base64=UNSET if is_text(stat.name) else _raw(stat.name),
        )


def _raw(name: str) -> str:
    return base64.b64encode(name.encode("utf-8", "surrogateescape")).decode("ascii")


class ListingView(View, frozen=True, kw_only=True):
    entries: list[FileView]
    truncated: bool


class UnpackedView(View, frozen=True, kw_only=True):
    files: int
    bytes: int
