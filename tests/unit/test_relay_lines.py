"""Lines of base64, however they are cut, and whatever else may come."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.link.protocol import ProtocolError
from capsule.providers.relay.lines import LONGEST, Lines


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 20))
def test_lines_are_put_together_however_they_are_cut(pieces: list[bytes], step: int) -> None:
    text = "".join(base64.b64encode(piece).decode() + "\n" for piece in pieces)
    lines = Lines()
    heard = b"".join(lines.feed(text[at : at + step]) for at in range(0, len(text), step))
    assert heard == b"".join(pieces)


@pytest.mark.parametrize("text", ["bash: no such file\n", "AAA\n", "AAAA\r\n", "é\n", "A===\n"])
def test_anything_else_is_told(text: str) -> None:
    with pytest.raises(ProtocolError, match="did not start, but said"):
        Lines().feed(text)


def test_no_line_is_endless() -> None:
    lines = Lines()
    with pytest.raises(ProtocolError, match="limit"):
        for _ in range(LONGEST // 65536 + 1):
            lines.feed("A" * 65536)
