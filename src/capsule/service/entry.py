"""One sandbox as the service holds it, and what of it is kept across restarts.

Whether it is over is decided by the monotonic clock, so that setting the clock neither ends a
sandbox early nor keeps it. The wall clock is what people see, and all there is after a reboot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, NamedTuple

from capsule.errors import CapsuleError, GoneError, UnavailableError, WrongStateError
from capsule.link.link import AgentLink
from capsule.model import (
    ROOT,
    SYSTEM_PATH,
    Handle,
    Isolation,
    Layer,
    Limits,
    SandboxId,
    Started,
    State,
    Step,
    Template,
    Unenforced,
    User,
    VolumeMount,
)
from capsule.providers.contract import Box
from capsule.service.caller import DEFAULT_TENANT
from capsule.service.carry import Session
from capsule.service.clock import Clock
from capsule.service.former import Former
from capsule.service.template_names import shown
from capsule.service.values import Sandbox

MOVES: Mapping[State, frozenset[State]] = {
    State.CREATING: frozenset({State.RUNNING, State.STOPPING, State.FAILED, State.GONE}),
    State.RUNNING: frozenset({State.PAUSED, State.STOPPING, State.FAILED}),
    State.PAUSED: frozenset({State.RUNNING, State.STOPPING, State.FAILED}),
    State.STOPPING: frozenset({State.GONE, State.FAILED}),
    State.FAILED: frozenset({State.STOPPING}),
    State.GONE: frozenset(),
}

ROOT_HOME = "/root"

_AS_ITSELF = SandboxId("")

_ENV: Mapping[str, str] = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}


def environment(template: Template, env: Mapping[str, str]) -> dict[str, str]:
    """What a program starts with in a sandbox that was given `env`."""
    return {**_ENV, **_names(template.user), **template.env, **env}


def as_root(environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, **_names(User(ROOT, ROOT_HOME))}


def _names(user: User) -> dict[str, str]:
    return {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}


@dataclass(frozen=True, slots=True)
class Record:
    """What the store keeps of a sandbox: enough to adopt it, or to get rid of it."""

    id: SandboxId
    state: State
    template: Template
    provider: str
    limits: Limits
    env: Mapping[str, str]
    metadata: Mapping[str, str]
    ttl: float
    idle_timeout: float
    created: float  # wall clock
    expires: float  # wall clock
    deadline: float  # monotonic, meaningful during `boot`
    boot: str
    handle: Mapping[str, Any] | None = None
    isolation: Isolation | None = None
    unenforced: tuple[Unenforced, ...] = ()
    key: str | None = None
    reason: str = ""
    box_id: SandboxId | None = None  # None: the sandbox's own
    on_timeout: str = "delete"
    auto_resume: bool = False
    keep_memory: bool = True
    pause_kept: str = ""
    held: bool = False
    started: Started = Started.COLD
    runtime: str = ""
    layers: tuple[Layer, ...] = ()
    snapshot: str = ""
    steps: tuple[Step, ...] = ()
    volumes: tuple[VolumeMount, ...] = ()
    ports: str = "private"
    request_host: str = ""
    tenant: str = DEFAULT_TENANT  # as all are that were recorded before there were tenants
    notes: Mapping[str, str] = field(default_factory=dict)


# A field of both is kept across restarts: nothing else has to know of it.
_KEPT = tuple(f.name for f in fields(Record) if f.name != "boot")
_KEPT_AS_IT_IS = tuple(name for name in _KEPT if name not in ("expires", "deadline", "box_id"))


class Used(NamedTuple):
    """An idempotency key that has made a sandbox, and whose it is."""

    tenant: str
    key: str


@dataclass(slots=True, eq=False)
class Entry:
    """Changed by the service's modules only, and its state only by `Sandboxes.move`."""

    id: SandboxId
    template: Template
    provider: str
    limits: Limits
    env: Mapping[str, str]
    metadata: Mapping[str, str]
    ttl: float
    idle_timeout: float
    created: float
    expires: float
    deadline: float
    active: float  # monotonic: when somebody last used it
    key: str | None = None
    runtime: str = ""  # as it was asked for
    credential: str = field(default="", repr=False)  # for its provider; recorded nowhere
    on_timeout: str = "delete"  # or "pause"
    auto_resume: bool = False  # whoever uses it while it is paused wakes it
    keep_memory: bool = True  # when it is paused for its timeout
    pause_kept: str = ""  # while it is paused: "memory", or "files"
    held: bool = False  # its time does not go on while it is paused
    layers: tuple[Layer, ...] = ()  # what its files began from, topmost first
    snapshot: str = ""  # where they came from, if it had a name
    steps: tuple[Step, ...] = ()  # restore points; none: it keeps none
    volumes: tuple[VolumeMount, ...] = ()
    ports: str = "private"  # or "public", or "token"
    request_host: str = ""
    tenant: str = DEFAULT_TENANT
    notes: Mapping[str, str] = field(default_factory=dict)  # an edge's, of no meaning here
    progress: str = ""
    state: State = State.CREATING
    reason: str = ""
    box_id: SandboxId = _AS_ITSELF  # what its box was launched as
    handle: Mapping[str, Any] | None = None
    isolation: Isolation | None = None
    started: Started = Started.COLD
    unenforced: tuple[Unenforced, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    box: Box | None = None
    link: AgentLink | None = None
    using: int = 0  # operations going on
    execs: int = 0  # of them, execs
    environ: dict[str, str] = field(init=False)  # what a program starts with
    sessions: dict[str, Session] | None = None  # None: not read from the store yet
    learned: set[str] = field(default_factory=set)  # execs whose report its sessions have taken
    began: dict[str, float] = field(default_factory=dict)  # wall clock: execs that were looked at
    launching: asyncio.Task[None] | None = None
    resetting: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    formers: set[Former] = field(default_factory=set)  # boxes before a reset, while they go
    # Two viewers that come at once must not start two shells of one name.
    joining: asyncio.Lock = field(default_factory=asyncio.Lock)
    # A pause and a resume that come at once are one after the other.
    shifting: asyncio.Lock = field(default_factory=asyncio.Lock)
    # One step after the other: each has a number, and is what changed since the one before.
    stepping: asyncio.Lock = field(default_factory=asyncio.Lock)
    at_end: list[Callable[[], None]] = field(default_factory=list)  # called when its box is over
    checked: float = 0.0  # monotonic: when its agent last answered
    cpu_seen: float | None = 0.0  # ms of its box that were counted; None: it was there before us
    cpu_of_execs: float = 0.0  # ms of execs in its box that have ended
    retry_at: float = 0.0  # monotonic: when to try again what failed

    def __post_init__(self) -> None:
        self.box_id = self.box_id or self.id
        self.environ = environment(self.template, self.env)

    @classmethod
    def of(cls, record: Record, clock: Clock, boot: str) -> Entry:
        """As recorded. Across a reboot the monotonic deadline is made from the wall clock."""
        now, wall = clock.monotonic(), clock.now()
        same_boot = record.boot != "" and record.boot == boot
        left = record.deadline - now if same_boot else record.expires - wall
        if record.state is not State.PAUSED:  # a paused one may have longer
            left = min(left, record.ttl)
        return cls(
            **{name: getattr(record, name) for name in _KEPT_AS_IT_IS},
            expires=wall + left,
            deadline=now + left,
            active=now,
            checked=now,
            box_id=record.box_id or record.id,
        )

    def record(self, boot: str, *, state: State | None = None) -> Record:
        kept: dict[str, Any] = {name: getattr(self, name) for name in _KEPT}
        return Record(**{**kept, "state": state or self.state}, boot=boot)

    def view(self) -> Sandbox:
        return Sandbox(
            id=self.id,
            template=shown(self.template.name),
            provider=self.provider,
            state=self.state,
            isolation=self.isolation,
            started=self.started if self.isolation else None,
            created_at=datetime.fromtimestamp(self.created, UTC),
            expires_at=datetime.fromtimestamp(self.expires, UTC),
            ttl=self.ttl,
            idle_timeout=self.idle_timeout,
            limits=self.limits,
            unenforced=self.unenforced,
            metadata=self.metadata,
            env=self.env,
            reason=self.reason,
            progress=self.progress,
            about=self.about,
            on_timeout=self.on_timeout,
            auto_resume=self.auto_resume,
            keep_memory=self.keep_memory,
            pause_kept=self.pause_kept,
            snapshot=self.snapshot,
            checkpoint="each" if self.steps else "none",
            volumes=self.volumes,
            ports=self.ports,
            request_host=self.request_host,
            tenant=self.tenant,
            notes=self.notes,
        )

    @property
    def used_key(self) -> Used | None:
        return None if self.key is None else Used(self.tenant, self.key)

    def tell(self, progress: str) -> None:
        self.progress = progress

    def take(self, box: Box, started: Started | None = None) -> None:
        """`started` is how it came by it; None: as before, it is taken up again."""
        self.started = started or self.started
        self.cpu_seen, self.cpu_of_execs = None if started is None else 0.0, 0.0
        self.began = self.began if started is None else {}
        self.box = box
        self.box_id = box.handle.sandbox_id
        self.link = AgentLink(box.connect)
        self.handle = box.handle.data
        self.isolation = box.isolation
        self.unenforced = tuple(box.unenforced)
        self.about = dict(box.about)
        self.progress = ""

    def end(self) -> None:
        """Its box is over: whoever holds something of it lets go."""
        told, self.at_end = self.at_end, []
        for tell in told:
            tell()

    def box_handle(self) -> Handle:
        return Handle(self.provider, self.box_id, self.handle or {})

    def running(self) -> AgentLink:
        """The way to its agent. Raises what keeps it from being used."""
        if self.state is State.RUNNING and self.link is not None:
            return self.link
        raise self.refusal()

    def refusal(self) -> CapsuleError:
        # It ends before the task that ends it has come to say so.
        ends = self.ending is not None and self.state not in (State.GONE, State.FAILED)
        state = State.STOPPING if ends else self.state
        about = {"sandbox_id": self.id, "state": str(state)}
        match state:
            case State.STOPPING | State.GONE:
                return over(self.id, self.reason, state=str(state))
            case State.FAILED:
                hint = "delete it and create another"
                return GoneError(f"sandbox {self.id} failed: {self.reason}", hint=hint, **about)
            case State.RUNNING | State.PAUSED if self.box is None:
                text = f"sandbox {self.id} has not been reached since the server's restart"
                return UnavailableError(text, hint="try again in a few seconds", **about)
            case State.PAUSED:
                more = "" if self.auto_resume else ", or create sandboxes with auto_resume"
                hint = f"resume it first{more}"
                return WrongStateError(f"sandbox {self.id} is paused", hint=hint, **about)
            case _:
                hint = "wait until its state is running"
                return WrongStateError(f"sandbox {self.id} is {state}", hint=hint, **about)


def over(id: SandboxId, reason: str, **details: str) -> GoneError:
    return GoneError(
        f"sandbox {id} is over: {reason}", hint="create another", sandbox_id=id, **details
    )
