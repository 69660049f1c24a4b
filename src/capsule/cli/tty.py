"""This terminal in raw mode: every key goes to the other side; the old mode always comes back."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
import tty
from collections.abc import Iterator

# ssh's own: at the beginning of a line, ~ and . leave, whatever the other side does.
_ESCAPE, _LEAVE = b"~", b"."


@contextlib.contextmanager
def raw_mode() -> Iterator[None]:
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSANOW)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def size() -> tuple[int, int]:
    """Rows and columns as they are now; not what LINES and COLUMNS said when the shell began."""
    try:
        cols, rows = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return 24, 80
    return max(rows, 1), max(cols, 1)


class Screen:
    """What the other side has switched on in this terminal, and would leave on if it were cut off:
    the alternate screen, mouse reports, bracketed paste; or off: the cursor."""

    _MODES = re.compile(rb"\x1b\[\?([0-9;]{1,30})([hl])")
    _CURSOR = b"25"
    _OURS = frozenset((b"47", b"1047", b"1049", b"1000", b"1002", b"1003", b"1006", b"2004", b"1"))

    def __init__(self) -> None:
        self._changed: set[bytes] = set()
        self._tail = b""

    def watch(self, data: bytes) -> None:
        data = self._tail + data
        for numbers, switch in self._MODES.findall(data):
            for mode in numbers.split(b";"):
                on = (switch == b"h") != (mode == self._CURSOR)
                (self._changed.add if on else self._changed.discard)(mode)
        # A sequence may be cut in two; one that is seen twice does no harm.
        self._tail = data[-40:]

    def undo(self) -> bytes:
        """The alternate screen last: leaving it moves the cursor to where it was before."""
        modes = sorted(self._changed & (self._OURS | {self._CURSOR}), key=lambda m: m == b"1049")
        steps = [b"\x1b[?" + m + (b"h" if m == self._CURSOR else b"l") for m in modes]
        return b"".join(steps) + b"\x1b[0m" if steps else b""


class Keys:
    """Watches what is typed for the way out. `feed` gives what the other side gets; None: leave."""

    def __init__(self) -> None:
        self._line_begins = True
        self._held = b""

    def feed(self, data: bytes) -> bytes | None:
        out = b""
        for byte in (data[i : i + 1] for i in range(len(data))):
            if self._held:
                if byte == _LEAVE:
                    return None
                self._held, out = b"", out + _ESCAPE + (b"" if byte == _ESCAPE else byte)
                self._line_begins = False
            elif self._line_begins and byte == _ESCAPE:
                self._held = byte
            else:
                out += byte
                self._line_begins = byte in (b"\r", b"\n")
        return out
