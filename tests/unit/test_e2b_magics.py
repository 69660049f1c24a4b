"""What IPython understands, in code for Python."""

from __future__ import annotations

import time

import pytest

from capsule.edge.e2b.magics import plain
from capsule.errors import InvalidError


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("  x = 1\n  y = 2\n", "x = 1\ny = 2\n"),
        ("\n \t\n  if x:\n    y\n\n z", "\n \t\nif x:\n  y\n\n z"),
        ("  s = '\x0b  a\x85  b\u2028  c'\r\n  t", "s = '\x0b  a\x85  b\u2028  c'\r\nt"),
        ("x = 1\n  y", "x = 1\n  y"),
        ("   \n\t\n", "   \n\t\n"),
        ("", ""),
    ],
)
def test_code_that_is_indented_as_a_whole(code: str, told: str) -> None:
    assert plain(code) == told


def test_commands_and_magics() -> None:
    assert "subprocess" in plain("x = 1\n!ls") and plain("%matplotlib inline") == "pass"
    assert plain("s = '''\n!ls\n'''") == "s = '''\n!ls\n'''"
    with pytest.raises(InvalidError, match="%magic is not known here"):
        plain("%magic")


@pytest.mark.parametrize(
    "code",
    [
        " " * 4_000_000 + "x",
        " " * 4_000_000,
        " \n" * 2_000_000 + "  x",
        "".join(f"{' ' * 1000}x{n}\n" for n in range(4000)),
        "s = '''\n!ls\n'''\n" + "x = 1\n" * 600_000,
    ],
    ids=["one line", "only blanks", "blank lines", "deep", "long"],
)
def test_no_code_takes_long(code: str) -> None:
    """It is on the loop."""
    began = time.process_time()
    plain(code)
    assert time.process_time() - began < 0.5
