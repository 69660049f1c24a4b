"""What a provider is: it brings up a box with our agent in it, and gets rid of it.

How to write one is in docs/providers.md; `capsule.testing.suite` tells whether it is right. Only
CapsuleErrors leave a provider: whatever a backend raises is translated here. A caller may cancel
any of these calls at any time.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from capsule.errors import UnavailableError
from capsule.link.stream import ByteStream
from capsule.model import (
    MIB,
    Handle,
    Isolation,
    Limits,
    SandboxId,
    SandboxSpec,
    Unenforced,
    Usage,
)

__all__ = [
    "ARCHIVED",
    "Adjustable",
    "Box",
    "ByteStream",
    "Capabilities",
    "FileChange",
    "Finding",
    "Haltable",
    "Layered",
    "Mark",
    "Measured",
    "Merging",
    "OutOfReachError",
    "Pausable",
    "Portable",
    "Provider",
    "Saved",
    "VolumeLook",
    "Volumed",
]


class OutOfReachError(UnavailableError):
    """What runs the boxes does not answer. It says nothing about any of them: none is given up."""


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
    warnings: tuple[str, ...] = ()  # what a server says in its log, once


class Box(abc.ABC):
    """A running box. Owned by the service; `handle` is what survives a restart."""

    handle: Handle
    isolation: Isolation
    unenforced: Sequence[Unenforced]
    about: Mapping[str, str] = MappingProxyType({})  # for people: runtime, image, transport …
    idle_memory: int = 16 * MIB  # about what the host pays while nothing runs in it

    @abc.abstractmethod
    async def connect(self) -> ByteStream:
        """A fresh byte stream to the agent, one for each operation: hundreds may be open at once.

        Quick: every exec waits for it. Raises UnavailableError when the box does not answer.
        """

    @abc.abstractmethod
    async def destroy(self) -> None:
        """Returns when no process, mount, cgroup, volume or address is left.

        Idempotent, also when called twice at once. Raises UnavailableError when something is left;
        then the box is still in `owned`, and it is called again.
        """


class Provider(abc.ABC):
    """Brings up a box with our agent in it, and gets rid of it. Nothing else."""

    name: ClassVar[str]

    @abc.abstractmethod
    async def open(self) -> None:
        """Called once, before anything but `probe`.

        Raises UnavailableError when it cannot work here; `aclose` is called all the same.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Let go of what the provider itself holds. Boxes go on running. Idempotent."""

    @abc.abstractmethod
    async def probe(self) -> Capabilities:
        """What this host can do; for each thing it cannot, the reason and the fix. Also before
        `open`: this is what `capsule doctor` asks."""

    def expect(self) -> None:  # noqa: B027  # most providers have nothing to begin
        """A launch follows in a moment, unless something comes in between. Never waits."""

    @abc.abstractmethod
    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        """Start a box. On return its agent has answered; on any failure nothing is left behind.

        A failure includes being cancelled. Until it is gone, what there is of the box is in
        `owned`, from before its first part exists: a server may be killed at any point.

        Raises ConflictError (the id is in use), NotFoundError (the image, an interpreter),
        CapacityError, NoSpaceError, UnavailableError, NotSupportedError (something in the spec that
        this provider cannot do).
        """

    @abc.abstractmethod
    async def adopt(self, handle: Handle) -> Box | None:
        """Take up a box that outlived a server restart, or that seems dead. None: it is gone.

        None ends the sandbox, so doubt is not None: raises UnavailableError when this cannot be
        told now, and OutOfReachError when it could be told of no box. May be called for a box that
        is in use, which it does not disturb.
        """

    @abc.abstractmethod
    def owned(self) -> AsyncIterator[Handle]:
        """Every box of this server, recorded or not, half made or half removed. The reaper's only
        source. Other servers' boxes on the same host are not among them."""

    @abc.abstractmethod
    async def discard(self, handle: Handle) -> None:
        """Remove whatever is left of a box that is not, or cannot be, adopted.

        As `destroy`, but from the handle alone. What never was is fine.
        """


@runtime_checkable
class Pausable(Protocol):
    """A box that can stop its programs and let them go on, memory kept."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


@runtime_checkable
class Haltable(Protocol):
    """A box whose programs can be ended sooner than all of it is removed."""

    async def halt(self) -> None:
        """Returns when none of its programs runs any more. `destroy` follows, and nothing else.

        Raises UnavailableError when they may; then `destroy` is what ends them.
        """


@dataclass(frozen=True, slots=True)
class Saved:
    """What was kept of a box: bytes of content, and how many files and folders."""

    size: int
    files: int
    copied: int = 0  # of these bytes, what was not kept before
    changed: bool = True  # since what it was told to compare with
    at: float = 0.0  # when, by the box's clock of files
    whole: bool = False  # it has all of the box's files: the layers that the box began from, too
    delta: bool = False  # it lies on the layers of the save before, and has what changed since
    below: int = 0  # bytes of the box's own files that these have
    replaced: int | None = None  # of those, what it hides, if only that is known


@dataclass(frozen=True, slots=True)
class Mark:
    """A save of the same box, in a row of them: what has not changed since is taken from its
    layers. Without layers: the row begins."""

    layers: tuple[str, ...] = ()  # of this box's files alone, topmost first
    at: float = 0.0
    size: int = 0  # bytes of the files that it told
    over: bool = False  # they lie on those that the box began from
    delta: bool = False  # what has not changed may be left out, and stay in these layers alone


@dataclass(frozen=True, slots=True)
class FileChange:
    path: bytes  # as programs see it
    change: str  # added, modified or removed
    type: str  # file, dir or symlink
    size: int


@runtime_checkable
class Layered(Protocol):
    """A provider that keeps what boxes have written as layers, and starts boxes from them
    (`SandboxSpec.layers`). It knows no more of a layer than its name; who uses it is the service's
    to remember. In `features`: "snapshot"."""

    max_layers: int  # under one box

    async def save(
        self, box: Box, layer: str, *, full: bool, most_bytes: int, since: Mark | None = None
    ) -> Saved:
        """Keep what the box has written since it began from its layers (`full`: with all of them)
        under this name. It stands still meanwhile. All or nothing.

        Raises NotSupportedError, ConflictError, TooLargeError, NoSpaceError, UnavailableError.
        """

    async def diff(
        self, old: Sequence[str], new: Sequence[str], *, most: int
    ) -> Sequence[FileChange]:
        """What is different between two stacks of layers, by path. Looks at no more than the
        folders that the layers have in which they differ. At most so many."""

    async def settle(self, layers: Sequence[str]) -> None:
        """On return a crash of the machine loses nothing of them."""

    async def kept(self) -> Sequence[str]:
        """Every layer of this server."""

    async def drop(self, layer: str) -> None:
        """Fine if it never was. Never called for one that a box runs from."""


@runtime_checkable
class Merging(Layered, Protocol):
    """One that can make fewer layers of many, so that steps need not begin anew."""

    async def merge(self, layer: str, stack: Sequence[str], *, count: int) -> Saved:
        """Keep what the topmost `count` layers of a stack show over the others as one, under this
        name, to be saved upon (`Mark`) in their place. They stay as they are. It costs what these
        have, and not what is below them. All or nothing.

        Raises NotFoundError, InvalidError, TooLargeError, NoSpaceError, UnavailableError.
        """


ARCHIVED = b"files/"  # before each name in the tar that layers travel as


@runtime_checkable
class Portable(Layered, Protocol):
    """One that also lets files leave the host, and takes in others. They travel as a tar. Names are
    paths as programs see them, below `files/`; a folder comes before what is in it, and whole
    before the next one; a hard link after the file. Owners, devices and extended attributes are no
    part of it: all belongs to the sandbox's user."""

    def read_layers(self, layers: Sequence[str], *, most_bytes: int) -> AsyncGenerator[bytes, None]:
        """The files of a stack as they are together, without the blocks that end a tar. What is
        wrong with them is raised before the first piece. They are kept meanwhile.

        Raises NotFoundError, TooLargeError, ForbiddenError, UnavailableError.
        """

    async def write_layer(
        self, layer: str, pieces: AsyncGenerator[bytes, None], *, most_bytes: int
    ) -> Saved:
        """Keep the files of a tar, which may come from somebody hostile, under this name: the
        layer to start from alone. All or nothing; only what `pieces` ends without an error is kept.

        Raises InvalidError, ConflictError, TooLargeError, NoSpaceError, and what `pieces` raises.
        """


@runtime_checkable
class Adjustable(Protocol):
    """A box that can be given other limits before its first program runs. The feature `adjust`
    announces it; `SandboxSpec.adjustable` says that somebody may want to."""

    def adjusts(self, limits: Limits) -> bool:
        """Whether `adjust` can give it these: all that it shows of them can still be changed."""

    async def adjust(self, limits: Limits) -> None:
        """On return programs have these limits, as if it had been launched with them.

        Raises UnavailableError; then nobody knows what it has, and it is not used.
        """


class VolumeLook(NamedTuple):
    used: int | None = None  # bytes in it; None where to know that costs more than to ask
    problem: str | None = None  # what keeps it from what it promises, and what to do


@runtime_checkable
class Volumed(Protocol):
    """A provider that has folders of its own which boxes may share, and which outlive them
    (`SandboxSpec.volumes`). In `features`: "volume"."""

    async def make_volume(self, id: str, *, size: int | None = None) -> None:
        """On return it outlives a crash of the machine. `size`: the most bytes that it holds; only
        asked of a provider with "volume_size" in its `features`.

        Raises NotSupportedError, NoSpaceError, UnavailableError; then nothing is left of it.
        """

    async def look_at_volume(self, id: str) -> VolumeLook: ...

    async def volumes(self) -> Sequence[str]:
        """Every volume of this server."""

    async def drop_volume(self, id: str) -> None:
        """Fine if it never was. Never called for one that a box has."""


@runtime_checkable
class Measured(Protocol):
    """A box whose use of the host is known better outside of it than to its agent."""

    async def measure(self, inside: Usage) -> Usage:
        """What its agent has measured, with what is known better."""
