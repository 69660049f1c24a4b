"""One run in a context, as its caller follows it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import msgspec

from capsule.errors import CapsuleError, UnavailableError
from capsule.model import MIB, Stream
from capsule.service.kernel_wire import Raised, Shown
from capsule.service.room import SMALL, Room

AHEAD = MIB  # bytes that a run may be ahead of whoever follows it
MAX_RESULTS = 256
MAX_RESULT_BYTES = 16 * MIB
_SHARE = 4 * MIB


class Text(NamedTuple):
    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended. `died`: its interpreter did; `lost`: it ended, but nobody knows how."""

    run: int
    context: str
    status: str  # ok, error, interrupted, timed_out, died, lost
    state: str  # the context's, afterwards
    duration_ms: float = 0.0
    exit_code: int | None = None  # of the last command, in a shell
    reason: str = ""  # why the context is dead
    dropped: int = 0  # results that were too many, too large or cut
    lost_bytes: int = 0  # of output: more came than could be taken in


RunEvent = Text | Shown | Raised | RunEnd


@dataclass(slots=True)
class RunResult:
    end: RunEnd
    stdout: bytes
    stderr: bytes
    results: list[Shown]
    error: Raised | None
    stdout_truncated: bool = False
    stderr_truncated: bool = False


class LiveRun:
    """Iterate for events; the last one is a RunEnd. Closing leaves the code running: a task of the
    service sees it to its end, and keeps the context for it until then.

    Iterating raises GoneError when the sandbox was ended meanwhile, UnavailableError when its box
    cannot be reached: what the run did is unknown then. So does one that reads too slowly.
    """

    def __init__(self, context: str, run: int) -> None:
        self.context = context
        self.run = run
        self._events: deque[tuple[int, RunEvent]] = deque()
        self._size = 0
        self._error: CapsuleError | None = None
        self._over = False
        self._closed = False
        self._moved = asyncio.Event()  # something came, or there is room again
        self._room = asyncio.Event()

    def put(self, event: RunEvent, size: int = 0) -> None:
        if self._closed:
            return
        self._events.append((size, event))
        self._size += size
        self._over = isinstance(event, RunEnd)
        self._moved.set()

    def fail(self, error: CapsuleError) -> None:
        self._error, self._over = error, True
        self._moved.set()

    async def room(self, patience: float) -> None:
        """Wait for a follower that is behind; it is given up after `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                while self._size > AHEAD and not self._closed:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            await self.aclose()
            text = f"the output of run {self.run} was not read for too long"
            self.fail(UnavailableError(text, hint="the run goes on; read faster", run=self.run))

    @property
    def behind(self) -> bool:
        return self._size > AHEAD

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._over or self._closed:
                raise StopAsyncIteration
            self._moved.clear()
            await self._moved.wait()
        size, event = self._events.popleft()
        self._size -= size
        self._room.set()
        return event

    async def aclose(self) -> None:
        """Idempotent."""
        self._closed = True
        self._events.clear()
        self._size = 0
        self._moved.set()
        self._room.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@dataclass(slots=True)
class _Kept:
    limit: int
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    truncated: bool = False

    def add(self, data: bytes) -> int:
        kept = data[: max(self.limit - self.size, 0)]
        self.truncated = self.truncated or len(kept) < len(data)
        self.size += len(kept)
        self.parts.append(kept)
        return len(kept)


async def collect(live: LiveRun, room: Room, limit: int) -> RunResult:
    """Everything a run gives, to its end; `limit` bytes of each stream."""
    kept = {Stream.STDOUT: _Kept(limit), Stream.STDERR: _Kept(limit)}
    results: list[Shown] = []
    error: Raised | None = None
    left = SMALL
    async with live:
        async for event in live:
            if isinstance(event, Text):
                left -= kept[event.stream].add(event.data)
            elif isinstance(event, Shown):
                results.append(event)
                left -= _size(event)
            elif isinstance(event, Raised):
                error = event
            else:
                out, err = kept[Stream.STDOUT], kept[Stream.STDERR]
                stdout, stderr = b"".join(out.parts), b"".join(err.parts)
                return RunResult(
                    end=event,
                    stdout=stdout,
                    stderr=stderr,
                    results=results,
                    error=error,
                    stdout_truncated=out.truncated,
                    stderr_truncated=err.truncated,
                )
            while left < 0:
                left += _SHARE
                await room.take(_SHARE)
    raise AssertionError("a run ends with its end, or raises")


def _size(shown: Shown) -> int:
    fields = (getattr(shown, name) for name in Shown.__struct_fields__)
    return sum(len(each) for each in fields if isinstance(each, str | msgspec.Raw))


class Tally:
    """How much a run may show; the rest is counted."""

    def __init__(self) -> None:
        self.dropped = 0
        self._count = 0
        self._size = 0

    def admits(self, shown: Shown) -> int | None:
        """The size that it counts with; None: it is dropped."""
        size = _size(shown)
        if self._count >= MAX_RESULTS or self._size + size > MAX_RESULT_BYTES:
            self.dropped += 1
            return None
        self._count += 1
        self._size += size
        return size
