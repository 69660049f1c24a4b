"""A follower of an exec's stream: gaps, unfinished characters, a box that dies."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.edge import follow
from capsule.edge.follow import PIECE, Chunk, Event, Follower
from capsule.edge.views import ExitView, GapView
from capsule.errors import UnavailableError
from capsule.link.exec_stream import Gap, Output
from capsule.model import Exit, Reason, Stream
from capsule.service import LiveExec

OUT, ERR = Stream.STDOUT, Stream.STDERR


class Scripted:
    """An exec's stream with these items."""

    exec_id = "e1"

    def __init__(self, *items: Output | Gap | Exception) -> None:
        self._items = list(items)
        self.exit: Exit | None = None

    def __aiter__(self) -> Scripted:
        return self

    async def __anext__(self) -> Output | Gap:
        if not self._items:
            self.exit = Exit(Reason.EXITED, 0)
            raise StopAsyncIteration
        item = self._items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item


def follower(*items: Output | Gap | Exception, text: bool = True, **offsets: int) -> Follower:
    return Follower(cast(LiveExec, Scripted(*items)), text=text, **offsets)


async def all_of(source: Follower) -> list[Any]:
    seen: list[Event] = [event async for event in source]
    assert isinstance(seen[-1], ExitView)
    return seen[:-1]


async def test_a_gap_comes_after_what_was_held_before_it() -> None:
    err = Output(ERR, 0, b"\x82\xac")  # another stream's: no end of that character
    source = follower(Output(OUT, 0, b"x\xe2"), err, Gap(OUT, 2, 50), Output(OUT, 50, b"y"))
    assert await all_of(source) == [
        Chunk(OUT, 0, "x"),
        Chunk(ERR, 0, "��"),
        Chunk(OUT, 1, "�"),
        GapView(stream=OUT, start=2, end=50),
        Chunk(OUT, 50, "y"),
    ]


@pytest.mark.parametrize("text", [True, False])
async def test_no_event_has_more_than_a_piece_of_output(text: bool) -> None:
    data = ("x" + "€" * 500_000).encode()
    source = follower(Output(OUT, 0, data[:-1]), Output(OUT, len(data) - 1, data[-1:]), text=text)
    seen = await all_of(source)
    sizes = [len(c.data.encode() if text else c.data) for c in seen]
    assert max(sizes) <= PIECE and sum(sizes) == len(data)
    assert [c.offset for c in seen] == list(itertools.accumulate(sizes[:-1], initial=0))
    assert source.offsets == (len(data), 0)


@settings(max_examples=50)
@given(
    pieces=st.lists(st.binary(max_size=30) | st.text(max_size=10).map(str.encode), max_size=6),
    text=st.booleans(),
    data=st.data(),
)
async def test_going_on_behind_any_event_loses_and_repeats_nothing(
    pieces: list[bytes], text: bool, data: st.DataObject
) -> None:
    whole = b"".join(pieces)
    starts = itertools.accumulate(map(len, pieces), initial=0)
    outputs = [Output(OUT, at, part) for at, part in zip(starts, pieces, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "PIECE", 7)
        source = follower(*outputs, text=text)
        seen, ids = [], [(0, 0)]
        async for event in source:
            seen.append(event)
            ids.append(source.offsets)
        left = data.draw(st.integers(0, len(seen) - 1))  # the event after which the client was cut
        at = ids[left][0]
        again = await all_of(follower(Output(OUT, at, whole[at:]), text=text, stdout=at))
    got = [chunk.data for chunk in [*seen[:left], *again] if isinstance(chunk, Chunk)]
    if text:
        assert "".join(got) == whole.decode("utf-8", "replace")  # type: ignore[arg-type]
    else:
        assert b"".join(got) == whole  # type: ignore[arg-type]


async def test_a_broken_stream_invents_no_exit_and_counts_no_half_character() -> None:
    source = follower(Output(OUT, 0, b"ab\xe2\x82"), UnavailableError("the agent is gone"))
    seen: list[Event] = []
    with pytest.raises(UnavailableError):
        async for event in source:
            seen.append(event)  # noqa: PERF401  # what came before the failure counts
    assert seen == [Chunk(OUT, 0, "ab")]
    assert source.offsets == (2, 0)
