"""What a provider is: it brings up a box with our agent in it, and gets rid of it."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from capsule.model import Handle, Isolation, SandboxId, SandboxSpec, Unenforced


class ByteStream(Protocol):
    """A connection to an agent. `link` cannot tell a Unix socket from a Docker attach."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """At least one byte; b"" at the end of the stream. Raises UnavailableError if it broke."""

    async def send(self, data: bytes) -> None:
        """Returns when the transport has taken the bytes (backpressure)."""

    async def aclose(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `capsule doctor`: something the host can or cannot do."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider can do on this host; for each thing it cannot, the reason and the fix."""

    provider: str
    usable: bool
    isolation: Isolation
    features: frozenset[str] = frozenset()  # "pause", "snapshot", … : the optional protocols
    unenforced: tuple[Unenforced, ...] = ()
    findings: tuple[Finding, ...] = field(default_factory=tuple)


class Box(abc.ABC):
    """A running box. Owned by the service; `handle` is what survives a restart."""

    handle: Handle
    isolation: Isolation
    unenforced: Sequence[Unenforced]

    @abc.abstractmethod
    async def connect(self) -> ByteStream:
        """A fresh byte stream to the agent; callable again after the last one broke.

        Raises UnavailableError when the box does not answer.
        """

    @abc.abstractmethod
    async def destroy(self) -> None:
        """Idempotent. Returns when no process, mount, cgroup, volume or address is left."""


class Provider(abc.ABC):
    """Brings up a box with our agent in it, and gets rid of it. Nothing else."""

    name: ClassVar[str]

    @abc.abstractmethod
    async def open(self) -> None:
        """Called once before anything else. Raises UnavailableError when it cannot work here."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Let go of what the provider itself holds. Boxes go on running."""

    @abc.abstractmethod
    async def probe(self) -> Capabilities:
        """What this host can do; for each thing it cannot, the reason and the fix."""

    @abc.abstractmethod
    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        """Start a box. On return its agent has answered; on any failure nothing is left behind.

        Raises NotFoundError (the image, an interpreter), CapacityError, UnavailableError,
        NotSupportedError (something in the spec that this provider cannot do).
        """

    @abc.abstractmethod
    async def adopt(self, handle: Handle) -> Box | None:
        """Take up a box that outlived a server restart. None: it is gone."""

    @abc.abstractmethod
    def owned(self) -> AsyncIterator[Handle]:
        """Every box that carries our label, recorded or not. The reaper's only source."""

    @abc.abstractmethod
    async def discard(self, handle: Handle) -> None:
        """Remove whatever is left of a box that cannot be adopted. Idempotent."""


@runtime_checkable
class Pausable(Protocol):
    """A box that can stop its programs and let them go on, memory kept."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...
