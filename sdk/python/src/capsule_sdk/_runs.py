"""What a run in a context gives: printed text, values in their forms, an error, an end."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from .errors import RunFailedError
from .values import _known

_BINARY = ("png", "jpeg", "pdf")


@dataclass(frozen=True, slots=True)
class Printed:
    """What code, its child processes or its libraries wrote."""

    stream: str  # "stdout" or "stderr"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A value in the forms it offers; None where it has none of that kind.

    `is_main`: it is the last expression's; the others were displayed.
    """

    is_main: bool = False
    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: bytes | None = None
    jpeg: bytes | None = None
    latex: str | None = None
    json: Any = None
    pdf: bytes | None = None
    javascript: str | None = None
    data: Mapping[str, Any] | None = None  # of a table: columns, index, rows, total_rows …
    chart: Mapping[str, Any] | None = None  # type, title, x, y, series
    errors: Mapping[str, str] = field(default_factory=dict)  # forms that could not be made

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        binary = {name: _bytes(body[name]) for name in _BINARY if name in body}
        return _known(cls, {**body, **binary})

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of those it has."""
        others = ("is_main", "errors")
        fields = self.__dataclass_fields__
        return tuple(n for n in fields if n not in others and getattr(self, n) is not None)


def _bytes(text: str) -> bytes | None:
    """What hostile code calls a picture may not even be base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class RunError:
    """What the code raised. `traceback` is text, as a person would see it."""

    name: str
    value: str
    traceback: str = ""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        return _known(cls, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended: `status` is ok, error, interrupted, timed_out, died or lost."""

    status: str
    run: int = 0
    context: str = ""
    duration_ms: float = 0.0
    exit_code: int | None = None  # of the last command, in a shell
    state: str = ""  # the context's, afterwards: idle or dead
    reason: str = ""  # why it is dead
    dropped: int = 0  # results that were too many, too large or damaged
    lost_bytes: int = 0  # of output that came faster than it could be taken in

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        return _known(cls, body)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


RunEvent = Printed | Result | RunError | RunEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(RunEnd):
    """Everything that a run gave."""

    results: tuple[Result, ...] = ()
    error: RunError | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        results = tuple(Result.from_json(each) for each in body.get("results", ()))
        error = RunError.from_json(body["error"]) if body.get("error") else None
        return _known(cls, {**body, "results": results, "error": error})

    @property
    def main(self) -> Result | None:
        """The last expression's value."""
        return next((each for each in reversed(self.results) if each.is_main), None)

    @property
    def text(self) -> str | None:
        """The last expression's value as text; None where there is none."""
        return self.main.text if self.main else None

    def check(self) -> Self:
        """Return self, or raise RunFailedError when the run did not end well."""
        if self.ok:
            return self
        raise RunFailedError(self._story(), result=self)

    def _story(self) -> str:
        if self.error is not None:
            return f"the code failed: {self.error.name}: {self.error.value}"[:500]
        if self.exit_code:
            return f"the last command exited with {self.exit_code}"
        return f"the run ended as {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """A context as it was when it was asked about."""

    id: str
    language: str
    state: str  # idle, running or dead
    reason: str = ""  # why it is dead
    cwd: str = ""
    created_at: datetime
    runs: int = 0
    waiting: int = 0
    lost_run: int | None = None  # under way when the server was restarted
    exec_id: str = ""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        created = datetime.fromisoformat(body["created_at"])
        return _known(cls, {**body, "created_at": created})
