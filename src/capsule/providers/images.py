"""What a provider's sandboxes start from: its images, how they are made, and how they move.

A provider that has images announces them beside itself (see `registry`). An image belongs to a
template and goes by its name; what the provider calls it is its own affair (`Image.reference`).
Only CapsuleErrors come out.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar

from capsule.errors import NotSupportedError
from capsule.model import Template


@dataclass(frozen=True, slots=True)
class Image:
    provider: str
    reference: str  # what the provider calls it
    id: str
    size: int  # bytes
    created: float  # wall clock
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image is built from."""

    context: BinaryIO | None = None  # a tar, seekable, nobody else's; None: what Capsule brings
    file: str = "Dockerfile"  # its path in the context
    args: Mapping[str, str] = field(default_factory=dict)
    cache: bool = True  # take over steps of earlier builds
    pull: bool = False  # look for a newer base, though there is one


@dataclass(frozen=True, slots=True)
class Step:
    """A step begins."""

    number: int
    total: int
    text: str


@dataclass(frozen=True, slots=True)
class Log:
    """What a step said, as it came: neither whole lines nor only one."""

    text: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """A part of a base image on its way here. `total` is 0 where nobody knows."""

    part: str
    status: str
    current: int = 0
    total: int = 0


Progress = Step | Log | Fetch


@dataclass(frozen=True, slots=True)
class Look:
    """`take` is told which of the programs `names` an image has in its PATH, in a thread."""

    names: tuple[str, ...]
    take: Callable[[Image, frozenset[str]], None]


class Tail:
    """The last characters of a text that comes in parts."""

    def __init__(self, most: int = 64 * 1024) -> None:
        self._most, self._length = most, 0
        self._parts: deque[str] = deque()

    def add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)
        while self._length - len(self._parts[0]) >= self._most:
            self._length -= len(self._parts.popleft())

    def __str__(self) -> str:
        return "".join(self._parts)[-self._most :]


class Images(abc.ABC):
    provider: ClassVar[str]

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Idempotent."""

    @abc.abstractmethod
    async def find(self, template: Template) -> Image | None:
        """The template's image. None: there is none, or it has none of its own here."""

    @abc.abstractmethod
    async def programs(self, template: Template, names: tuple[str, ...]) -> frozenset[str]:
        """Which of these the image has in its PATH. Raises NotFoundError (the image)."""

    @abc.abstractmethod
    async def save(self, template: Template, target: BinaryIO) -> None:
        """Write it as `docker save` would. Raises NotFoundError."""

    @abc.abstractmethod
    async def load(self, template: Template, archive: Path, look: Look | None = None) -> Image:
        """Take an archive (`docker save`, an OCI layout, a plain root) as the template's image.

        `look` sees it before it takes the place of one that is there, and may raise. Raises
        InvalidError, TooLargeError, NotSupportedError, NoSpaceError, UnavailableError.
        """

    @abc.abstractmethod
    async def remove(self, template: Template) -> bool:
        """False: there is none. Raises ConflictError when something still runs from it."""

    def build(self, template: Template, recipe: Recipe) -> AsyncGenerator[Progress, None]:
        """Build the template's image; it is there when the iteration ends.

        Closing the generator early cancels the build. Whatever happens, nothing is left of it but
        the image. Raises InvalidError with the failing step and its output in the details,
        NotFoundError (a base), NoSpaceError, UnavailableError, NotSupportedError.
        """
        raise NotSupportedError(
            f"provider {self.provider} cannot build images",
            hint="build with Docker, then `capsule template export` and `import`",
        )

    async def tidy(self) -> None:
        """Remove what builds left that were killed; quick when there is nothing."""
        return
