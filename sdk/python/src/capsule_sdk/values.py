"""What the client hands out: frozen values, read from the server's JSON in one place each."""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cache
from typing import Any, Self, TypeVar

from .errors import ExecFailedError

T = TypeVar("T")


@cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls))


def _known(cls: type[T], body: Mapping[str, Any]) -> T:
    """Build `cls` from the fields it knows; a newer server may send more."""
    names = _names(cls)  # type: ignore[arg-type]  # a class is hashable, whatever T is
    return cls(**{key: value for key, value in body.items() if key in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a program ended. `reason` is exactly one of exited, signaled, timed_out, oom_killed,
    output_limit, cancelled; `exit_code` is 128 + signal for a signal, as a shell says it."""

    reason: str
    exit_code: int
    timed_out: bool = False
    signal: int = 0
    duration_ms: float = 0.0
    cpu_ms: float = 0.0
    max_rss_bytes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    exec_id: str = ""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        return _known(cls, body)

    @property
    def ok(self) -> bool:
        return self.reason == "exited" and self.exit_code == 0

    def check(self) -> Self:
        """Return self, or raise ExecFailedError when the program did not exit with 0."""
        if self.ok:
            return self
        raise ExecFailedError(self._story(), result=self)

    def _story(self) -> str:
        match self.reason:
            case "exited":
                return f"the program exited with {self.exit_code}"
            case "signaled":
                return f"the program was ended by signal {self.signal}"
            case "timed_out":
                return f"the program was stopped after {self.duration_ms / 1000:.1f} s"
            case "oom_killed":
                return "the program was killed: the sandbox is out of memory"
            case "output_limit":
                return "the program was stopped: it wrote more than its output limit"
            case _:
                return f"the program was {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult(Exit):
    """How a program ended and what it wrote. Bytes that are not UTF-8 are shown as U+FFFD."""

    stdout: str = ""
    stderr: str = ""

    def _story(self) -> str:
        # Zero-argument super() does not survive the class that slots=True builds.
        story = Exit._story(self)
        last = self.stderr.strip().rsplit("\n", 1)[-1]
        return f"{story}: {last[:200]}" if last else story


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes a program wrote. Chunks of valid UTF-8 never split a character, so `text` is whole."""

    stream: str  # "stdout", "stderr", or "pty" for a terminal
    offset: int  # of the first byte, in its stream
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes `start` up to `end` of a stream are no longer kept by the server."""

    stream: str
    start: int
    end: int


Event = Output | Gap | Exit


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is at a path. `name` and `path` are for people: bytes that are not UTF-8 are shown as
    U+FFFD. `name_bytes` and `path_bytes` are exact, and every method takes them as paths."""

    name: str
    path: str
    type: str  # file, dir, symlink, fifo, socket, device
    size: int
    mode: int
    mtime: float
    target: str | None = None
    name_bytes: bytes = b""
    path_bytes: bytes = b""

    @classmethod
    def from_json(
        cls, body: Mapping[str, Any], path: bytes | None = None, *, parent: bytes = b"/"
    ) -> FileInfo:
        """At `path`, or under its own name in the folder `parent`."""
        exact = body.get("name_base64")
        name = base64.b64decode(exact) if exact else body["name"].encode()
        path = posixpath.join(parent, name) if path is None else path
        return _known(cls, {**body, "name_bytes": name, "path_bytes": path})

    @property
    def is_dir(self) -> bool:
        return self.type == "dir"

    def __str__(self) -> str:
        return f"{self.path}/" if self.is_dir else self.path


@dataclass(frozen=True, slots=True)
class Written:
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Change:
    """Something happened to a file under a watched path: create, write, remove, rename, chmod;
    `overflow` means that changes came faster than they could be told: list again."""

    change: str
    path: str
    is_dir: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes are bytes, cpus are cores."""

    memory: int
    cpus: float
    processes: int
    disk: int
    inodes: int
    open_files: int

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Limits:
        return _known(cls, body)


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A limit that the server's host cannot enforce, why, and what would make it possible."""

    what: str
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    id: str
    template: str
    created_at: datetime
    expires_at: datetime | None
    state: str = "running"
    provider: str = ""
    isolation: str = ""
    started: str | None = None  # "warm": its box was ready, in a pool; "cold": it was launched
    idle_timeout: float = 0.0
    limits: Limits | None = None
    unenforced: tuple[Unenforced, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None
    progress: str = ""  # what its creation is doing, if that takes its time
    about: Mapping[str, str] = field(default_factory=dict)  # runtime, image, transport …
    on_timeout: str = "delete"  # or "pause"
    auto_resume: bool = False
    snapshot: str = ""  # what its files began from
    checkpoint: str = "none"  # or "each"
    volumes: tuple[Mapping[str, Any], ...] = ()  # each name, path, read_only
    ports: str = "private"  # or "public"
    tenant: str = "default"

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> SandboxInfo:
        values = dict(body)
        values["created_at"] = datetime.fromisoformat(values["created_at"])
        if expires := values.get("expires_at"):
            values["expires_at"] = datetime.fromisoformat(expires)
        if limits := values.get("limits"):
            values["limits"] = Limits.from_json(limits)
        values["volumes"] = tuple(values.get("volumes") or ())
        values["unenforced"] = tuple(_known(Unenforced, u) for u in values.get("unenforced") or ())
        if (idle_ms := values.get("idle_timeout_ms")) is not None:
            values["idle_timeout"] = idle_ms / 1000
        return _known(cls, values)


@dataclass(frozen=True, slots=True)
class ShelfInfo:
    """Boxes that are ready for one template, provider and runtime."""

    template: str
    provider: str
    runtime: str = ""
    ready: int = 0
    launching: int = 0
    min: int = 0
    max: int = 0
    target: int = 0  # how many there should be now
    hits: int = 0
    misses: int = 0
    discarded: int = 0
    waiting: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What the server has ready, and who waits."""

    shelves: tuple[ShelfInfo, ...] = ()
    waiting: int = 0
    launching: int = 0
    max_launches: int = 0
    memory_bytes: int = 0
    max_memory_bytes: int = 0

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> PoolInfo:
        values = dict(body)
        values["shelves"] = tuple(_known(ShelfInfo, shelf) for shelf in body.get("shelves") or ())
        return _known(cls, values)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A restore point: the sandbox's files after one exec. Step 0 is how it began."""

    step: int
    exec_id: str
    cmd: str
    created_at: datetime
    size: int = 0
    copied: int = 0  # bytes; what the step before did not have

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StepInfo:
        created = datetime.fromisoformat(body["created_at"])
        return _known(cls, {**body, "created_at": created})


@dataclass(frozen=True, slots=True)
class FileChange:
    """What became of a path between two steps: added, modified or removed."""

    path: str
    change: str
    type: str = "file"
    size: int = 0
    path_bytes: bytes = b""  # exact, where the name is not UTF-8

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> FileChange:
        exact = body.get("path_base64")
        path = base64.b64decode(exact) if exact else body["path"].encode()
        return _known(cls, {**body, "path_bytes": path})


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A folder that outlives sandboxes."""

    name: str
    provider: str
    created_at: datetime
    metadata: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None  # the most bytes that it holds; None: as many as the server's disk
    used: int | None = None  # bytes in it, known where it has a size
    problem: str | None = None  # what keeps it from what it promises, and what to do

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> VolumeInfo:
        created = datetime.fromisoformat(body["created_at"])
        return _known(cls, {**body, "created_at": created})


@dataclass(frozen=True, slots=True)
class WebhookInfo:
    """Who is told what happens. `secret` is known only to who made it."""

    webhook_id: str
    url: str
    events: tuple[str, ...]
    created_at: datetime
    secret: str | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> WebhookInfo:
        created = datetime.fromisoformat(body["created_at"])
        return _known(cls, {**body, "created_at": created, "events": tuple(body["events"])})


@dataclass(frozen=True, slots=True)
class DeliveryInfo:
    """What a webhook was told, or is to be told."""

    delivery_id: str
    event: str
    created_at: datetime
    state: str  # pending, delivered, failed
    attempts: tuple[Mapping[str, Any], ...]  # each at, duration_ms, status, error
    next_at: datetime | None
    body: str

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> DeliveryInfo:
        values = dict(body)
        values["created_at"] = datetime.fromisoformat(body["created_at"])
        values["attempts"] = tuple(body["attempts"])
        if body.get("next_at"):
            values["next_at"] = datetime.fromisoformat(body["next_at"])
        return _known(cls, values)


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The files of a sandbox at one moment. `size` is their content, with all layers below."""

    name: str
    template: str
    provider: str
    created_at: datetime
    size: int = 0
    files: int = 0
    layers: int = 1
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> SnapshotInfo:
        created = datetime.fromisoformat(body["created_at"])
        return _known(cls, {**body, "created_at": created})


@dataclass(frozen=True, slots=True)
class ExecInfo:
    """A program that runs in the sandbox, or ran there lately (`exit` is set)."""

    id: str
    pid: int
    cmd: tuple[str, ...]
    tty: bool
    running: bool
    exit: Exit | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ExecInfo:
        values = dict(body)
        values["id"] = values.get("id") or values.get("exec_id")
        values["cmd"] = tuple(values.get("cmd") or values.get("argv") or ())
        if exit_body := values.get("exit"):
            values["exit"] = Exit.from_json(exit_body)
        return _known(cls, values)


@dataclass(frozen=True, slots=True)
class Metrics:
    """What the sandbox uses; None where its host cannot measure it."""

    cpu_ms: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    processes: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
    oom_kills: int | None = None
    source: str = ""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Metrics:
        return _known(cls, body)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an upload or download of a folder moved, and what it left out and why."""

    files: int
    bytes: int
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """What a provider's sandboxes start from."""

    provider: str
    reference: str  # what the provider calls it
    id: str
    size: int
    created_at: datetime

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        created = datetime.fromisoformat(body["created_at"])
        return _known(cls, {**body, "created_at": created})


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInfo:
    """What a sandbox can start from. `images` is empty where many templates are listed."""

    name: str
    description: str = ""
    languages: tuple[str, ...] = ()
    default_language: str = ""
    limits: Limits | None = None
    network: str = "none"
    ttl: float = 0.0
    origin: str = ""  # built-in, folder or made; only what was made can be deleted
    root: str = ""
    image: str = ""
    images: tuple[ImageInfo, ...] = ()

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        limits = body.get("limits")
        values = {
            "languages": tuple(body.get("languages") or ()),
            "limits": _known(Limits, limits) if limits else None,
            "ttl": body.get("ttl_ms", 0) / 1000,
            "images": tuple(ImageInfo.from_json(each) for each in body.get("images") or ()),
        }
        return _known(cls, {**body, **values})
