"""Terminals: type into one, take one over, or open somebody else's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.escape.attempt import Attempt, cases, proofs, scenario
from tests.escape.conftest import Cell
from tests.escape.machine import Refused, Sandbox
from tests.support import wait_for

pytestmark = pytest.mark.real

Check = Callable[[Attempt], None]

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
        "console",
        "open a console of the machine",
        """
        for path in ("/dev/console", "/dev/tty0", "/dev/tty1", "/dev/ttyS0", "/dev/vcs1"):
            try:
                os.open(path, os.O_RDWR | os.O_NOCTTY)
                escaped(path)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof="root's consoles; see open-nodes",
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


SECRETIVE = """
import os, time
with open("ready", "w") as file: file.write(os.ttyname(0))
time.sleep(5)
"""
SNOOP = """
import os, sys
for path in {sys.argv[1], *(f"/dev/pts/{n}" for n in range(16))}:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        continue
    os.write(fd, b"snooped")
"""


@scenario(
    "terminal-of-another",
    "write to the terminal of a program in another sandbox",
    proof="see host-terminal",
)
def test_a_terminal_belongs_to_its_sandbox(cell: Cell) -> None:
    with cell.box() as other, cell.box() as sandbox:
        running = other.send("python3", "-c", SECRETIVE, tty=True, id="tty")
        path = wait_for(lambda: _read(other, "/workspace/ready"), what="the terminal is open")
        sandbox.exec("python3", "-c", SNOOP, path)
        other.ask("kill", "tty")
        assert "snooped" not in cell.driver.wait(running)["out"]


def _read(sandbox: Sandbox, path: str) -> str:
    try:
        return sandbox.read(path)
    except Refused:  # not there yet
        return ""
