"""What the clients were told, which is what the server is held to.

An operation that was answered holds. One that was not may have happened or not, but wholly: until
somebody looks, the value that it would have changed may be the old one or the new one (`Cell`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# What happens in the instant in which a server is killed reaches no webhook and no audit log.
INSTANT = 1.5
KINDS = (
    "audit", "contexts", "execs", "files", "forks", "resets", "sandboxes", "sessions", "snapshots",
    "streams", "volumes", "webhooks",
)  # fmt: skip
SHOWN = 12  # events of an object, with a violation


class Violation(NamedTuple):
    kind: str
    name: str
    what: str
    expected: str
    seen: str
    events: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.kind} {self.name}: {self.what}\n  expected {self.expected}\n  seen     "
        return head + "\n    ".join([self.seen, *self.events])


class Owed(NamedTuple):
    """Something that happened to a sandbox, of which webhooks are told."""

    event: str
    sandbox: str
    exec_id: str = ""


@dataclass(slots=True)
class Model:
    seed: int
    lies: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    lied: Counter[str] = field(default_factory=Counter)  # by kind
    violations: list[Violation] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    doomed: set[str] = field(default_factory=set)  # sandboxes that a fault has killed
    owed: dict[Owed, float] = field(default_factory=dict)
    # Execs and deletes that were asked for while nothing could be recorded: webhooks may be told
    # twice of them.
    retold: set[str] = field(default_factory=set)
    requests: dict[str, tuple[str, float]] = field(default_factory=dict)  # changes, by their id
    slowest: float = 0.0
    full_until: float = 0.0  # the disk is full, or was until then
    # Of each object, and under "" what concerns all of them.
    events: defaultdict[str, deque[str]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=SHOWN))
    )
    began: float = field(default_factory=time.monotonic)

    def note(self, name: str, event: str) -> None:
        self.events[name].append(f"{time.monotonic() - self.began:8.3f} {event}")

    def violated(self, kind: str, name: str, what: str, expected: object, seen: object) -> None:
        events = sorted([*self.events[name], *self.events[""]])
        texts = (brief(expected), brief(seen))
        self.violations.append(Violation(kind, name, what, *texts, tuple(events)))

    def check(self, kind: str, name: str, what: str, expected: object, seen: object) -> None:
        self.counts["checks"] += 1
        if expected != seen:
            self.violated(kind, name, what, expected, seen)

    def acknowledged(self, kind: str, value: Any) -> Any:
        """The value as it is to be recorded; with `lies` another one."""
        if not self.lies:
            return value
        self.lied[kind] += 1
        return other_than(value)

    def owe(self, event: str, sandbox: str, exec_id: str = "") -> None:
        """Webhooks are to be told of this."""
        owed = Owed(event, self.acknowledged("webhooks", sandbox), exec_id)
        self.owed[owed] = time.monotonic()

    def changed(self, request: str, what: str) -> None:
        """The audit log is to have this request."""
        self.requests[self.acknowledged("audit", request)] = (what, time.monotonic())

    def surely(self, at: float) -> bool:
        """Whether the server lived on for long enough to write down what happened then."""
        return not any(at - INSTANT < kill < at + INSTANT for kill in self.kills)

    def due(self, kind: str) -> bool:
        """Whether there are to be more operations of this kind; of a liar's there are enough."""
        return not self.lies or self.lied[kind] < 3

    @property
    def lied_enough(self) -> bool:
        return self.lies and not any(map(self.due, KINDS))

    @property
    def full(self) -> bool:
        return time.monotonic() < self.full_until


class Cell:
    """One value that the server keeps: all that it may be, given the answers so far."""

    def __init__(self, model: Model, kind: str, of: str, what: str, value: Any = None) -> None:
        self._model = model
        self._kind = kind
        self._of = of
        self._what = what
        self.may_be = [value]

    def tried(self, value: Any) -> None:
        """It was asked for, and nobody answered."""
        self.may_be.append(value)

    def answered(self, value: Any) -> None:
        self.may_be = [self._model.acknowledged(self._kind, value)]

    def seen(self, value: Any) -> None:
        self._model.counts["checks"] += 1
        if value not in self.may_be:
            expected = " or ".join(map(brief, self.may_be))
            self._model.violated(self._kind, self._of, self._what, expected, value)
        if self.certain:
            self.may_be = [value]

    @property
    def certain(self) -> bool:
        """A sandbox's disk is sparse: what is written while the server's is full may be lost."""
        return self._kind == "volumes" or not self._model.full


def other_than(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "x"
        case bytes():
            return value + b"x"
        case (first, *rest):
            return (other_than(first), *rest)
    return "something else"


def brief(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}… ({len(text)})"
