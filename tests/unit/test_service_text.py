"""Text from bytes, chunk by chunk."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from capsule.service.text import Utf8Decoder


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_however_it_is_cut_the_text_is_that_of_the_whole(data: bytes, cuts: list[int]) -> None:
    decoder = Utf8Decoder()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    pieces = [decoder.feed(data[a:b]) for a, b in pairwise(edges)]
    assert "".join(pieces) + decoder.finish() == data.decode(errors="replace")


@given(st.text())
def test_no_piece_holds_half_a_character(text: str) -> None:
    decoder = Utf8Decoder()
    data = text.encode(errors="replace")
    pieces = [decoder.feed(data[i : i + 1]) for i in range(len(data))]
    assert "\ufffd" not in "".join(pieces).replace(text, "")
    assert "".join(pieces) == data.decode()
    assert decoder.finish() == ""
