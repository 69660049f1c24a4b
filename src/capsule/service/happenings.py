"""What happens to sandboxes, told where it happens to whoever wants to know: counters, the log of
executions, webhooks.

A listener is called at once, on the event loop, and must not wait; what takes time it does in a
task of its own. What it raises is logged, and hurts nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import structlog

from capsule.model import ExecId, Exit, SandboxId

log = structlog.get_logger(__name__)


class Kind(StrEnum):
    CREATED = "sandbox.created"
    DELETED = "sandbox.deleted"
    EXPIRED = "sandbox.expired"
    FAILED = "sandbox.failed"
    FINISHED = "exec.finished"


@dataclass(frozen=True, slots=True)
class Ended:
    """An exec whose end was seen."""

    id: ExecId
    argv: tuple[str, ...]
    exit: Exit


@dataclass(frozen=True, slots=True)
class Happening:
    kind: Kind
    at: float  # seconds since 1970
    sandbox: SandboxId
    template: str
    provider: str
    tenant: str = "default"
    reason: str = ""  # why a sandbox ended
    exec: Ended | None = None


class Happenings:
    def __init__(self) -> None:
        self.listeners: list[Callable[[Happening], None]] = []

    def tell(self, happening: Happening) -> None:
        for listener in self.listeners:
            try:
                listener(happening)
            except Exception:
                log.exception("a listener failed", happening=happening.kind)
