"""What the service takes and gives. Frozen: an edge can keep them, and cannot change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from capsule.model import (
    ExecId,
    Exit,
    Isolation,
    Layer,
    Limits,
    SandboxId,
    Started,
    State,
    Unenforced,
    VolumeMount,
)
from capsule.service.caller import DEFAULT_TENANT

DEFAULT_TEMPLATE = "python"
# Who may reach what listens in a sandbox: its tenant; whoever knows its id; or who also has a token
# that an edge has given them.
PORT_ACCESS = ("private", "public", "token")


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox as it is now. Later changes do not show; ask again."""

    id: SandboxId
    template: str
    provider: str
    state: State
    isolation: Isolation | None  # None while creating
    started: Started | None  # None while creating
    created_at: datetime  # UTC
    expires_at: datetime  # UTC
    ttl: float  # seconds; what keep_alive extends by
    idle_timeout: float  # seconds; 0: off
    limits: Limits
    unenforced: tuple[Unenforced, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""  # why it failed or is going; "" otherwise
    progress: str = ""  # what its creation is doing, if that takes its time
    about: Mapping[str, str] = field(default_factory=dict)  # its box: runtime, image, transport …
    on_timeout: str = "delete"  # or "pause": what happens at the end of its ttl, or when it is idle
    auto_resume: bool = False
    keep_memory: bool = True  # when it is paused for its timeout
    pause_kept: str = ""  # of one that is paused: "memory", or "files" alone
    snapshot: str = ""  # what its files began from
    checkpoint: str = "none"  # or "each"
    volumes: tuple[VolumeMount, ...] = ()
    ports: str = "private"  # one of PORT_ACCESS
    request_host: str = ""  # what programs there are told as Host; "": what the client wrote
    tenant: str = DEFAULT_TENANT  # whose it is
    notes: Mapping[str, str] = field(default_factory=dict)  # what an edge keeps with it


@dataclass(frozen=True, slots=True)
class VolumeWish:
    name: str
    path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Volume:
    name: str
    id: str
    provider: str
    created: float  # wall clock
    metadata: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None  # bytes that it may hold; None: as many as the host's disk
    tenant: str = DEFAULT_TENANT

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)


@dataclass(frozen=True, slots=True)
class CreateRequest:
    template: str = DEFAULT_TEMPLATE
    ttl: float | None = None
    idle_timeout: float | None = None  # 0: off
    limits: Mapping[str, Any] | None = None  # overrides: names are the fields of Limits
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    provider: str | None = None
    provider_key: str = field(default="", repr=False)  # for a cloud; "": the configuration's
    runtime: str | None = None  # of the provider's engine; None: the template's, or the default
    on_timeout: str = "delete"  # or "pause"
    auto_resume: bool = False
    keep_memory: bool = True  # False: a pause for its timeout ends its programs
    snapshot: str | None = None  # its template and provider go with it
    checkpoint: str = "none"  # or "each": a restore point after each exec
    volumes: tuple[VolumeWish, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # for an edge to find again
    ports: str = "private"
    request_host: str = ""
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    name: str
    provider: str
    template: str
    layers: tuple[Layer, ...]  # topmost first
    created: float  # wall clock
    metadata: Mapping[str, str] = field(default_factory=dict)
    tenant: str = DEFAULT_TENANT
    sandbox: str = ""  # whose files they were; "": not known

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def files(self) -> int:
        return sum(layer.files for layer in self.layers)

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)


@dataclass(frozen=True, slots=True)
class ExecCall:
    """Run a program. `cmd` is an argv; making a string a shell call is the edge's business."""

    cmd: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    timeout: float | None = None
    stdin: bytes = b""
    output_limit: int | None = None
    on_limit: str = "truncate"  # or "kill"
    user: str | None = None  # a name; None: the sandbox's user
    session: str | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class RunCall:
    """Run a piece of code in one of the template's languages (None: the template's default)."""

    code: str
    language: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    timeout: float | None = None
    stdin: bytes = b""
    output_limit: int | None = None
    on_limit: str = "truncate"
    user: str | None = None
    session: str | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class ExecResult:
    id: ExecId
    exit: Exit
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class Stats:
    """What the server is doing right now."""

    sandboxes: Mapping[State, int]
    max_sandboxes: int
    execs: int
    max_execs: int
    draining: bool
    execs_begun: int = 0  # since the server started
    started: Mapping[Started, int] = field(default_factory=dict)  # boxes given to sandboxes


class TarResult(NamedTuple):
    files: int
    bytes: int


class Terminal(NamedTuple):
    rows: int = 24
    cols: int = 80
