"""The values every layer speaks of. No behaviour beyond what the value itself knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType

SandboxId = NewType("SandboxId", str)
ExecId = NewType("ExecId", str)

MIB = 1024 * 1024
GIB = 1024 * MIB

WORKSPACE = "/workspace"
MOUNTS = "/mnt"  # below which volumes may be, too
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SUDO_FOLDER = "/opt/capsule/bin"  # of boxes with the host's /usr; the agent knows it, too
ROOT = "root"  # whom a program may be instead of the sandbox's user: root inside, nobody outside


class State(StrEnum):
    """creating → running ⇄ paused → stopping → gone, or failed from anywhere but gone."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    GONE = "gone"
    FAILED = "failed"


class Isolation(StrEnum):
    """What stands between a program and the host, strongest first."""

    CLOUD = "cloud"  # not this host at all: a sandbox of a cloud's, which is its own wall
    GVISOR = "gvisor"  # a kernel of its own, in user space
    NAMESPACES = "namespaces"  # Capsule's own, with users that nobody else has
    CONTAINER = "container"  # an engine's; its root is the host's unless the engine maps users
    LANDLOCK = "landlock"
    NONE = "none"  # never offered; what `doctor` says when nothing is possible

    def weaker_than(self, other: Isolation) -> bool:
        levels = list(Isolation)
        return levels.index(self) > levels.index(other)


class Started(StrEnum):
    """How a sandbox came by its box."""

    WARM = "warm"  # it was ready, in the pool
    COLD = "cold"  # it was launched for it


class Reason(StrEnum):
    """Why an exec ended: exactly one of these."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMED_OUT = "timed_out"
    OOM_KILLED = "oom_killed"
    OUTPUT_LIMIT = "output_limit"
    CANCELLED = "cancelled"


class Stream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"
    PTY = "pty"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use. Bytes are bytes, seconds are seconds, cpus are cores."""

    memory: int = 512 * MIB
    cpus: float = 0.5
    processes: int = 128
    disk: int = GIB
    inodes: int = 65_536
    open_files: int = 1024


@dataclass(frozen=True, slots=True)
class Language:
    """How `run` turns code into a program: where the code goes, and what is executed."""

    name: str
    filename: str  # written into the sandbox; "{id}" is replaced by the exec's id
    command: tuple[str, ...]  # "{file}" is replaced by the path of that file
    carry: str | None = None  # name of the carry snippet (see service/carry.py), if any


@dataclass(frozen=True, slots=True)
class User:
    """Who programs are: a name for uid 1000, and where its home is.

    A home other than /workspace is a second name of the same folder, except where a container has
    its folders in memory: there it is one of its own.
    """

    name: str = "capsule"
    home: str = WORKSPACE


@dataclass(frozen=True, slots=True)
class Template:
    """What a sandbox starts from. Loaded from YAML; carries no logic."""

    name: str
    description: str = ""
    root: str = "host"  # "host", "dir:/path", or "image:NAME" (see `capsule template import`)
    image: str = ""  # for providers that start from an engine's images; "": the provider's default
    runtime: str = ""  # of such an engine, by name; "": the provider's default
    languages: Mapping[str, Language] = field(default_factory=dict)
    default_language: str = "bash"
    needs: tuple[str, ...] = ()  # programs that must exist inside, e.g. ("python3",)
    shell: tuple[str, ...] = ("/bin/bash", "-l")
    user: User = field(default_factory=User)
    sudo: bool = False  # programs may ask for others that are root in the sandbox
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    network: str = "none"
    seccomp: str = "default"
    ttl: float = 600.0
    warm_context: str = ""  # the language whose interpreter runs in ready boxes; "": none does
    warm_imports: tuple[str, ...] = ()  # modules that it has loaded
    # Run by sh in each new sandbox, before anybody else can use it:
    prepare: str = ""  # to its end; not over a snapshot's files
    start: str = ""  # and left running
    ready: str = ""  # again and again, until it succeeds


@dataclass(frozen=True, slots=True)
class Layer:
    """What somebody wrote in a sandbox, relative to the layers below it."""

    id: str
    size: int = 0  # bytes of content
    files: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The files of a sandbox after one exec. 0 is how it began."""

    number: int
    layers: tuple[Layer, ...]
    created: float  # wall clock
    exec_id: str = ""
    cmd: str = ""  # what was run, for people
    copied: int = 0  # bytes that this step has and the one before has not
    size: int | None = None  # bytes written since its box began; None: the top layer has them all
    box_id: str = ""  # whose files they are
    at: float = 0.0  # when, by the clock of its files


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A volume in a sandbox: which one, where, and whether it may be written."""

    id: str
    path: str
    read_only: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """All a provider needs to launch a box. Environments are no part of it: each exec has one."""

    template: Template
    limits: Limits
    hostname: str = "capsule"
    runtime: str = ""  # "": the template's
    layers: tuple[str, ...] = ()  # of the provider's, topmost first; what its files begin from
    volumes: tuple[VolumeMount, ...] = ()
    # Of whoever asked, for a provider that is somebody else's; "": the configuration's.
    credential: str = field(default="", repr=False)
    # It may be given other limits later: nothing of it may be shared with boxes that are not.
    adjustable: bool = field(default=False, compare=False)
    # What a launch that takes its time (an image is pulled) is doing, for whoever waits for it.
    progress: Callable[[str], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A limit or protection that this host cannot give, and what would make it possible."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class ExecRequest:
    argv: tuple[str, ...]
    id: ExecId
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""  # "": the home of its user
    user: str = ""  # or ROOT; "": the sandbox's own
    timeout: float = 30.0  # 0: none
    stdin: bool = False
    tty: bool = False
    rows: int = 24
    cols: int = 80
    output_limit: int = 10 * MIB
    keep: str = "head"  # or "tail", or "flow": as tail, but the program waits for its readers
    on_limit: str = "truncate"  # or "kill"
    carry: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """What became of an exec's program. Never invented: it is what the kernel said."""

    reason: Reason
    exit_code: int
    signal: int = 0
    duration_ms: float = 0.0
    cpu_ms: float = 0.0
    max_rss_bytes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_truncated: bool = False
    stderr_truncated: bool = False

    @property
    def timed_out(self) -> bool:
        return self.reason is Reason.TIMED_OUT


@dataclass(frozen=True, slots=True)
class ExecInfo:
    id: ExecId
    pid: int
    argv: tuple[str, ...]
    tty: bool
    running: bool
    started_ms_ago: float
    exit: Exit | None
    stdout_bytes: int
    stderr_bytes: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a link leads to in the end."""

    path: str
    type: str
    mode: int
    size: int


@dataclass(frozen=True, slots=True)
class FileStat:
    name: str
    path: str
    type: str  # file, dir, symlink, fifo, socket, device
    size: int
    mode: int
    mtime: float
    uid: int
    gid: int
    target: str | None = None
    # What has to be asked for (`Detail`).
    mtime_ns: int = 0
    owner: str = ""
    group: str = ""
    resolved: Resolved | None = None  # of a link; None: it leads nowhere that its user may go
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Detail:
    """That more is to be told of files: names of users, where links end, and as metadata the
    extended attributes whose names begin with `attributes`, such as "user.mime."."""

    attributes: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_ms: float | None
    memory_bytes: int | None
    memory_peak_bytes: int | None
    processes: int | None
    io_read_bytes: int | None
    io_write_bytes: int | None
    disk_bytes: int | None
    inodes: int | None
    oom_kills: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Handle:
    """All that `adopt` needs to find a box again. JSON, so it can be stored.

    `sandbox_id` is what the box was launched as. A sandbox may have taken it over since, or given
    it up: whose it is, the service knows.
    """

    provider: str
    sandbox_id: SandboxId
    data: Mapping[str, Any] = field(default_factory=dict)
