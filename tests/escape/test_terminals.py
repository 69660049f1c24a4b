"""Terminals: type into one, take one over, or open somebody else's."""

from __future__ import annotations

import pytest

from tests.escape.attempt import Attempt, Check, cases, proofs

pytestmark = pytest.mark.real


ATTEMPTS = [
    Attempt(
        "type-into-terminal",
        "type a command into the terminal one was started from (TIOCSTI, CVE-2017-5226)",
        """
        number = tried("ioctl", 0, 0x5412, b"\\n")
        if number == errno.EIO: absent("this kernel has it switched off")
        if number: raise OSError(number, os.strerror(number))
        escaped("typed")
        """,
        terminal="both",
    ),
    Attempt(
        "type-high-bits",
        "the same, with bits set that the kernel ignores and a filter may not (CVE-2019-10063)",
        """
        number = tried("ioctl", 0, 0x5412 | 1 << 32, b"\\n")
        if number == errno.EIO: absent("this kernel has it switched off")
        if number: raise OSError(number, os.strerror(number))
        escaped("typed")
        """,
        terminal="both",
    ),
    Attempt(
        "paste-into-console",
        "paste a selection into a console (TIOCLINUX)",
        """
        number = tried("ioctl", 0, 0x541C, b"\\x03")
        if number != errno.EPERM: escaped("the terminal was asked")
        """,
        terminal="both",
    ),
    Attempt(
        "line-discipline",
        "load another line discipline (TIOCSETD)",
        """
        call("ioctl", 0, 0x5423, struct.pack("i", 0))
        escaped("set")
        """,
        terminal="both",
    ),
    Attempt(
        "host-terminal",
        "write to the terminal of somebody on the host",
        """
        fd = os.open(A["terminal"], os.O_WRONLY | os.O_NOCTTY)
        os.write(fd, b"escaped\\n")
        """,
        actors=("terminal",),
    ),
    Attempt(
        "read-host-terminal",
        "open it for reading and configure it",
        """
        import termios
        fd = os.open(A["terminal"], os.O_RDWR | os.O_NOCTTY)
        termios.tcgetattr(fd)
        escaped("open")
        """,
        actors=("terminal",),
    ),
    Attempt(
        "controlling-terminal",
        "open the terminal that the server was started from, by /dev/tty",
        "os.open('/dev/tty', os.O_RDWR); escaped('open')",
        terminal="proof",
    ),
    Attempt(
        "other-pts",
        "find a terminal in /dev/pts that is not one's own",
        """
        names = [n for n in os.listdir("/dev/pts") if n.isdigit()]
        own = os.path.basename(os.ttyname(0))
        if set(names) - {own}: escaped(names)
        """,
        terminal="both",
        actors=("terminal",),
        fresh=True,  # terminals of an exec before it may still be there for a moment
    ),
    Attempt(
        "hang-up",
        "hang up the terminal of everybody who shares it (vhangup)",
        "call('vhangup'); escaped('hung up')",
        proof="it would end the terminal that the tests may run on",
    ),
]


@cases(ATTEMPTS)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@proofs(ATTEMPTS)
def test_works_outside(attempt: Attempt, works: Check) -> None:
    works(attempt)
