"""Whole characters at exact offsets, wherever the chunks were cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from capsule.edge.text import TextCut, show

SAMPLE = "añ€😀\n"
CUTS = st.lists(st.integers(0, 40))


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.text(max_size=20), CUTS)
def test_text_survives_any_cut(text: str, cuts: list[int]) -> None:
    cut = TextCut()
    read = "".join(cut.feed(piece) for piece in pieces(text.encode(), cuts)) + cut.flush()
    assert read == text
    assert cut.offset == len(text.encode())


@given(st.binary(max_size=40), CUTS)
def test_any_bytes_read_as_they_would_whole(data: bytes, cuts: list[int]) -> None:
    cut = TextCut()
    read = "".join(cut.feed(piece) for piece in pieces(data, cuts)) + cut.flush()
    assert read == data.decode("utf-8", "replace")
    assert cut.offset == len(data)


@given(st.binary(max_size=40), CUTS, st.integers(0, 40))
def test_resuming_at_an_offset_loses_and_repeats_nothing(
    data: bytes, cuts: list[int], stop: int
) -> None:
    first = TextCut()
    before = "".join(first.feed(piece) for piece in pieces(data, cuts)[:stop])
    second = TextCut(first.offset)
    after = second.feed(data[first.offset :]) + second.flush()
    assert before + after == data.decode("utf-8", "replace")


def test_an_unfinished_character_is_not_counted() -> None:
    cut = TextCut(100)
    assert cut.feed(b"ab\xe2\x82") == "ab"
    assert cut.offset == 102
    assert cut.feed(b"\xac") == "€"
    assert cut.offset == 105


def test_bytes_that_are_no_text_are_shown_as_base64_or_replaced() -> None:
    assert show(b"\xff\x00a", "text") == "�\x00a"
    assert show(b"\xff\x00a", "base64") == "/wBh"
