"""This terminal in raw mode: every key goes to the other side; the old mode always comes back."""

from __future__ import annotations

import contextlib
import os
import shutil
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
        # A full-screen program that was cut off leaves these behind: the alternate screen, a hidden
        # cursor, colours, mouse reports, bracketed paste.
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?1049l\x1b[?25h\x1b[0m\x1b[?1000l\x1b[?1002l\x1b[?1006l\x1b[?2004l")


def size() -> tuple[int, int]:
    found = shutil.get_terminal_size()
    return max(found.lines, 1), max(found.columns, 1)


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
