"""What is known of a session, of what was run in it, and of what that left."""

from __future__ import annotations

import secrets
from base64 import b32encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from capsule.service.caller import DEFAULT_TENANT
from capsule.service.kernel_wire import Raised, Shown


class Phase(StrEnum):
    """opening → open → closed (→ opening …) → deleted."""

    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Kept:
    """A session's files after its sandbox."""

    how: str  # snapshot, or archive
    name: str  # of the snapshot, or of the file
    at: float  # wall clock
    size: int
    not_kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """`uid` is ours and never used twice; `id` may be its creator's choice, per tenant."""

    uid: str
    id: str
    phase: Phase
    environment: str
    template: str
    created: float  # wall clock, as `active`
    active: float
    idle_timeout: float
    tenant: str = DEFAULT_TENANT
    provider: str = ""
    language: str | None = None  # None: the template's
    agent: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    sandbox_id: str = ""  # "": it has none now
    sandboxes: tuple[str, ...] = ()  # that it had, oldest first
    key: str = ""  # with which its sandbox is created once
    kept: Kept | None = None
    reason: str = ""  # why it is closed

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)

    @property
    def active_at(self) -> datetime:
        return datetime.fromtimestamp(self.active, UTC)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that a program left, or that a result carried. Its content is found by its hash."""

    id: str
    session: str  # uid
    execution: int
    name: str  # below /workspace/artifacts, or made up for a result
    source: str  # file, or result
    mime: str
    size: int
    sha256: str
    created: float
    mtime: float = 0.0

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that is not kept, and why."""

    name: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be run, as the log has it."""

    kind: str  # code, or tool
    command: str  # the code, or the arguments as JSON
    language: str = ""
    tool: str = ""
    actor: str = ""  # whose key it was


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of anything did."""

    status: str  # ok, error, interrupted, timed_out, died, lost
    stdout: bytes = b""
    stderr: bytes = b""
    results: tuple[Shown, ...] = ()
    error: Raised | None = None
    exit_code: int | None = None
    reason: str = ""
    duration_ms: float = 0.0
    stdout_truncated: bool = False
    stderr_truncated: bool = False


@dataclass(frozen=True, slots=True)
class Executed:
    """An outcome with its place in the log, and what was kept of its files."""

    number: int
    outcome: Outcome
    artifacts: tuple[Artifact, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def new_uid() -> str:
    """80 random bits: none is found by guessing."""
    return b32encode(secrets.token_bytes(10)).decode().lower()
