"""Ready boxes of one kind, and how many there should be.

The target moves between `least` and `most`. A create that finds the shelf empty raises it by one:
a burst of forty makes room for forty. What stood there untouched for a whole `WINDOW` was not
needed, and half of it goes: the other half is what keeps the size from swinging.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from capsule.model import Limits, SandboxSpec
from capsule.providers.contract import Adjustable, Box

WINDOW = 60.0
BACKOFF = 1.0
MAX_BACKOFF = 60.0


def _never(limits: Limits) -> bool:
    return False


class Kind(NamedTuple):
    provider: str
    template: str
    runtime: str


@dataclass(frozen=True, slots=True)
class ShelfStatus:
    provider: str
    template: str
    runtime: str
    ready: int
    launching: int
    min: int
    max: int
    target: int
    hits: int  # creates and resets that got a box from here
    misses: int  # those that started cold
    discarded: int  # boxes that were dead, or not needed
    waiting: int  # creates in line for such a box
    memory_bytes: int  # what its boxes cost the machine


@dataclass(slots=True, eq=False)
class Stocked:
    box: Box
    checked: float  # monotonic: when its agent last answered


@dataclass(slots=True, eq=False)
class Shelf:
    kind: Kind
    spec: SandboxSpec
    least: int
    most: int
    since: float  # monotonic: when the window began
    target: int = 0
    ready: deque[Stocked] = field(default_factory=deque)
    launching: int = 0
    low: int = 0  # the fewest boxes that were ready in this window
    hits: int = 0
    misses: int = 0
    discarded: int = 0
    cost: int | None = None  # of an idle box, when the first one has said it
    told: bool = False  # that there is no memory for it
    adjusts: Callable[[Limits], bool] = _never  # as its boxes say
    retry_at: float = 0.0  # monotonic
    failures: int = 0

    def __post_init__(self) -> None:
        self.target = max(self.target, self.least)

    def suits(self, spec: SandboxSpec) -> bool:
        """Whether a box from here can become the one that is asked for."""
        own = self.spec.limits
        if spec.limits == own:
            return spec == self.spec
        return replace(spec, limits=own) == self.spec and self.adjusts(spec.limits)

    def take(self) -> Box | None:
        """The one that has been there longest."""
        if not self.ready:
            return None
        box = self.ready.popleft().box
        self.low = min(self.low, len(self.ready))
        return box

    def learn(self, box: Box, interpreter: int) -> None:
        """What such boxes cost, of which so many bytes are what runs in them, and can be changed
        in."""
        self.cost = box.idle_memory + interpreter
        self.adjusts = box.adjusts if isinstance(box, Adjustable) else _never

    def put(self, box: Box, now: float) -> None:
        self.failures = 0
        self.ready.append(Stocked(box, now))

    def want(self) -> None:
        """Somebody found it empty."""
        self.low = 0
        self.target = min(self.most, self.target + 1)

    def failed(self, now: float) -> None:
        self.failures += 1
        self.retry_at = now + min(MAX_BACKOFF, BACKOFF * 2.0 ** (self.failures - 1))

    def short(self) -> bool:
        return len(self.ready) + self.launching < self.target

    def settle(self, now: float) -> list[Box]:
        """Once per window, what is to go because nobody needs it."""
        if now - self.since < WINDOW:
            return []
        unneeded, self.since = self.low, now
        self.target = max(self.least, self.target - -(-unneeded // 2))
        surplus = len(self.ready) + self.launching - self.target
        gone = [self.ready.popleft().box for _ in range(min(surplus, len(self.ready)))]
        self.discarded += len(gone)
        self.low = len(self.ready)
        return gone

    def memory(self) -> int:
        return (len(self.ready) + self.launching) * (self.cost or 0)

    def status(self, waiting: int) -> ShelfStatus:
        return ShelfStatus(
            provider=self.kind.provider,
            template=self.kind.template,
            runtime=self.kind.runtime,
            ready=len(self.ready),
            launching=self.launching,
            min=self.least,
            max=self.most,
            target=self.target,
            hits=self.hits,
            misses=self.misses,
            discarded=self.discarded,
            waiting=waiting,
            memory_bytes=self.memory(),
        )
