"""Reading an exec's output for a client: in bytes or in whole characters, always knowing where it
stands.

Every stream an edge offers (SSE, WebSocket, the long poll of JSON-RPC) is one `Follower`. Its
`offsets` are where a client that was cut off goes on, without losing or repeating a byte. An event
carries at most `PIECE` bytes of output, so that no client needs room for more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from capsule.edge.text import TextCut, show
from capsule.edge.views import AttachView, ExitView, GapView
from capsule.link.exec_stream import Gap, Output
from capsule.model import Stream
from capsule.service import LiveExec

PIECE = 64 * 1024

# How long a poll waits for what the agent has kept: it comes at once, if there is anything.
_SETTLE = 0.05
_LULL = 0.01


class Chunk(NamedTuple):
    stream: Stream
    offset: int  # of its first byte
    data: str | bytes


Event = Chunk | GapView | ExitView


class Follower:
    """Iterate for events; the last one is the exit. `offsets` are those behind the event that came
    last.

    Raises UnavailableError when the box or its connection broke: there is no exit then. In text,
    a character still incomplete at that point is not counted in `offsets`, so it is whole after a
    resume.
    """

    def __init__(self, stream: LiveExec, *, text: bool, stdout: int = 0, stderr: int = 0) -> None:
        self.stream = stream
        self._text = text
        self._cuts = (TextCut(stdout), TextCut(stderr))
        self._first: Stream = Stream.STDOUT  # becomes PTY once a terminal speaks

    @property
    def offsets(self) -> tuple[int, int]:
        return self._cuts[0].offset, self._cuts[1].offset

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for item in self.stream:
            for event in self._output(item) if isinstance(item, Output) else self._gap(item):
                yield event
        for event in self._rest():
            yield event
        assert self.stream.exit is not None  # the iteration ends with it, or raises
        yield ExitView.of(self.stream.exec_id, self.stream.exit)

    def _cut(self, stream: Stream) -> TextCut:
        if stream is Stream.STDERR:
            return self._cuts[1]
        self._first = stream
        return self._cuts[0]

    # These are generators: `offsets` move on with each event that is taken, and no sooner.

    def _output(self, item: Output) -> Iterator[Event]:
        cut, at = self._cut(item.stream), 0
        while at < len(item.data):
            piece = item.data[at : at + PIECE - cut.held]
            at += len(piece)
            start = cut.offset
            content = cut.feed(piece) if self._text else cut.take(piece)
            if content:
                yield Chunk(item.stream, start, content)

    def _gap(self, item: Gap) -> Iterator[Event]:
        cut = self._cut(item.stream)
        yield from self._flush(item.stream, cut)
        cut.jump(item.end)
        yield GapView(stream=item.stream, start=item.start, end=item.end)

    def _rest(self) -> Iterator[Event]:
        first, second = self._cuts
        yield from self._flush(self._first, first)
        yield from self._flush(Stream.STDERR, second)

    def _flush(self, stream: Stream, cut: TextCut) -> Iterator[Event]:
        start = cut.offset
        if text := cut.flush():
            yield Chunk(stream, start, text)


async def poll(follower: Follower, *, wait: float, max_bytes: int, encoding: str) -> AttachView:
    """What there is now, or the first thing that comes within `wait` seconds."""
    parts: dict[bool, list[Any]] = {False: [], True: []}
    gaps: list[GapView] = []
    exit: ExitView | None = None
    size = 0
    patience = max(wait, _SETTLE)
    async with contextlib.aclosing(follower.__aiter__()) as events:  # type: ignore[type-var]
        while size < max_bytes and exit is None:
            try:
                event = await asyncio.wait_for(anext(events), patience)
            except TimeoutError:
                break
            patience = _LULL
            if isinstance(event, Chunk):
                parts[event.stream is Stream.STDERR].append(event.data)
                size += len(event.data)
            elif isinstance(event, GapView):
                gaps.append(event)
            else:
                exit = event
    stdout, stderr = (_joined(parts[is_stderr], encoding) for is_stderr in (False, True))
    return AttachView(
        stdout=stdout,
        stderr=stderr,
        stdout_offset=follower.offsets[0],
        stderr_offset=follower.offsets[1],
        running=exit is None,
        gaps=gaps,
        exit=exit,
    )


def _joined(parts: list[Any], encoding: str) -> str:
    return "".join(parts) if encoding == "text" else show(b"".join(parts), encoding)
