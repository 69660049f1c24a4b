"""What the Engine says while it builds, taken apart: no I/O in here.

A line is a JSON object. `stream` is both the builder's own words and what the steps print, so
nothing in it may be believed: a program can print anything. The ids that it names are noted, and
whoever removes something looks first whether it came with this build (leftovers.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from capsule.errors import (
    CapsuleError,
    InternalError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
)
from capsule.providers.images import Fetch, Log, Progress, Step, Tail

MOST_LINE = 4 * 1024 * 1024
MOST_LOG = 16 * 1024 * 1024  # bytes of output that are passed on

_STEP = re.compile(r"^step (\d{1,5})/(\d{1,5})\s*: (.*)", re.IGNORECASE | re.DOTALL)
_IMAGE = re.compile(r"^ ?--+> ([0-9a-f]{12,64})?$")  # scratch has none
_CONTAINER = re.compile(r"^ ?---> Running in ([0-9a-f]{12,64})$")
_REMOVING = re.compile(  # the latter: Docker 26
    r"^(Removing| ?---> Removed) intermediate container [0-9a-f]{12,64}$"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MISSING = re.compile(r"not found|access denied|manifest unknown|does not exist", re.I)
_UNREACHABLE = re.compile(
    r"dial tcp|no such host|timeout|timed out|connection re|TLS|toomanyrequests|Get \"https?:", re.I
)


class Lines:
    """Bytes in, whole lines out. A program may print megabytes without a line break."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MOST_LINE:
            raise InternalError(f"the Engine sent a line of over {MOST_LINE} bytes")
        return [line for line in lines if line.strip()]


class BuildStream:
    """One build's words. `images` and `containers` are the ids it named, oldest first."""

    def __init__(self, name: str) -> None:
        self.images: list[str] = []
        self.containers: list[str] = []
        self.done = False
        self.step: Step | None = None  # the one under way
        self._name = name
        self._tail = Tail()
        self._logged = 0
        self._midline = False  # what a step printed last has no end yet

    def hear(self, line: bytes) -> Iterator[Progress]:
        """Raises what the build failed with."""
        try:
            said = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnavailableError(f"the Engine's words make no sense: {line[:80]!r}") from error
        if not isinstance(said, dict):
            return
        if "error" in said or "errorDetail" in said:
            raise self._failure(said)
        if isinstance(said.get("aux"), dict):
            self.done = True  # of a stage; the end of the stream tells which was the last
        elif isinstance(text := said.get("stream"), str):
            yield from self._words(_COLOUR.sub("", text))
        elif isinstance(status := said.get("status"), str):
            yield self._fetch(status, said)

    def ended(self) -> None:
        """Raises UnavailableError when the stream ended, and the build had not."""
        if not self.done:
            raise UnavailableError(
                f"the build of {self._name} was cut off by the Engine",
                hint="see whether the Engine is still running, then build again",
                **self._where(),
            )

    def _words(self, text: str) -> Iterator[Progress]:
        line = text.strip("\n")
        if found := _STEP.match(line):
            self.done = False
            self.step = Step(int(found[1]), int(found[2]), " ".join(found[3].split()))
            self._tail = Tail()
            yield self.step
            return
        if found := _CONTAINER.match(line):
            self.containers.append(found[1])
        elif found := _IMAGE.match(line):
            self.images += [found[1]] if found[1] else []
        elif line.startswith("Successfully built "):
            self.done = True
        elif (line or self._midline) and not _REMOVING.match(line):
            self._midline = not text.endswith("\n")
            self._tail.add(text)
            yield from self._limited(text)

    def _limited(self, text: str) -> Iterator[Log]:
        before, self._logged = self._logged, self._logged + len(text)
        if self._logged <= MOST_LOG:
            yield Log(text)
        elif before <= MOST_LOG:
            yield Log(f"\n(output beyond {MOST_LOG} characters is left out)\n")

    def _fetch(self, status: str, said: Mapping[str, Any]) -> Fetch:
        detail = said.get("progressDetail")
        detail = detail if isinstance(detail, dict) else {}
        return Fetch(
            str(said.get("id", "")), status, _count(detail, "current"), _count(detail, "total")
        )

    def _failure(self, said: Mapping[str, Any]) -> CapsuleError:
        detail = said.get("errorDetail")
        detail = detail if isinstance(detail, dict) else {}
        message = " ".join(str(detail.get("message") or said.get("error")).split())[:1000]
        where, facts = self._at(), self._where()
        code = detail.get("code")
        if "no space left on device" in message.lower():
            hint = "free some space below the Engine's root (docker info)"
            return NoSpaceError(f"{where}: {message}", hint=hint, **facts)
        if isinstance(code, int) and code > 0:
            text = f"{where}: the command ended with {code}"
            return InvalidError(text, hint=_advice(message), exit_code=code, **facts)
        if self.step is not None and self.step.text.upper().startswith("FROM"):
            return _base_failure(f"{where}: {message}", message, facts)
        return InvalidError(f"{where}: {message}", hint=_advice(message), **facts)

    def _at(self) -> str:
        if self.step is None:
            return f"the build of {self._name} failed"
        step = self.step
        text = step.text if len(step.text) <= 100 else f"{step.text[:99]}…"
        return f"step {step.number} of {step.total} failed ({text})"

    def _where(self) -> dict[str, Any]:
        if self.step is None:
            return {"output": str(self._tail)}
        step = self.step
        facts = {"step": step.text, "number": step.number, "total": step.total}
        return {**facts, "output": str(self._tail)}


def _base_failure(text: str, message: str, facts: Mapping[str, Any]) -> CapsuleError:
    if _UNREACHABLE.search(message):
        hint = "let the Engine reach the registry, or start from a base that it has"
        return UnavailableError(text, hint=hint, **facts)
    if _MISSING.search(message):
        hint = "see whether its name is right, and `docker login` for a private one"
        return NotFoundError(text, hint=hint, **facts)
    return InvalidError(text, hint=_advice(message), **facts)


def _advice(message: str) -> str:
    if "BuildKit" in message:
        return "Capsule builds without BuildKit: leave out --mount, heredocs and the like"
    return "change the Dockerfile and build again"


def _count(detail: Mapping[str, Any], name: str) -> int:
    value = detail.get(name)
    return value if isinstance(value, int) else 0
