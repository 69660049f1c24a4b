"""An attempt to get out: a small program that says whether it did, and what the host says of it.

`cases(ATTEMPTS)` runs each in every kind of sandbox (a cell); `proofs(ATTEMPTS)` runs the same
program without a sandbox, where it must succeed: an attempt that could not work anyway proves
nothing.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

LEVELS = ("namespaces", "landlock")
USERS = ("root", "user")
CONTAINERS = ("docker", "gvisor")  # made by an Engine, with runc and with runsc
RELAYED = ("docker-relay", "gvisor-relay")  # the same, reached through the Engine
LOCAL = tuple(f"{level}-{who}" for level in LEVELS for who in USERS)
CELLS = (*LOCAL, *CONTAINERS)
WITH_ROOT = ("namespaces-root", "namespaces-user", "docker")  # whose programs may be root inside

# Of the local cells these run without CI=true: the strongest that there is, and the weakest.
USUAL = ("namespaces-root" if os.geteuid() == 0 else "namespaces-user", "landlock-user")
STRONGEST = USUAL[:1]

# Who runs the proof. Anything else in `proof` is the reason why there is none.
PEER = "peer"  # an ordinary user
ALONE = "alone"  # an ordinary user with no other process: it may harm all that this user runs
ROOT = "root"

# What a program finds before its own lines. `escaped` ends it; an OSError is a refusal.
PRELUDE = '''
A = json.loads(sys.argv[1])

def say(word, what):
    os.write(1, f"{word} {what}\\n".encode())
    os._exit(0)

def escaped(what): say("ESCAPED", what)
def absent(what): say("ABSENT", what)

def put(path, text):
    """Written at once: what a file object keeps for later fails where no one looks."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)
'''

# And before lines that use it.
CALLS = '''
libc = ctypes.CDLL(None, use_errno=True)

def check(result):
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result

def call(name, *arguments):
    """A system call by name; integers are passed in full width, bytes as pointers."""
    if name not in A["nr"]:
        absent(f"this architecture has no {name}")
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    libc.syscall.restype = ctypes.c_long
    return check(libc.syscall(ctypes.c_long(A["nr"][name]), *given))

def tried(name, *arguments):
    """The errno of a call: 0 when it worked."""
    try:
        call(name, *arguments)
    except OSError as error:
        return error.errno
    return 0
'''

# Imported where they are named: in some sandboxes each takes its milliseconds.
MODULES = (
    "ctypes", "errno", "fcntl", "json", "mmap", "os", "resource", "select", "signal", "socket",
    "stat", "struct", "subprocess", "sys", "time",
)  # fmt: skip

ENDING = """
except OSError as error:
    say("BLOCKED", error)
say("BLOCKED", "nothing came of it")
"""


class GotOut(AssertionError):
    """What an attempt must not do; where it is known to, nothing else counts as the failure."""


@dataclass(frozen=True, slots=True)
class Attempt:
    name: str
    what: str  # for the table in README.md
    code: str = ""  # Python, run after PRELUDE
    proof: str = PEER
    actors: tuple[str, ...] = ()  # what the host has for it to attack; see actors.py
    stands: Mapping[str, str] = field(default_factory=dict)  # cell: why it is known to work there

    killed: bool = False  # to be ended by the kernel is a refusal, too
    terminal: str = ""  # "both", or "proof": it only has one without a sandbox
    hardened: bool = False  # some hosts refuse it to everybody: then there is no proof
    unenforced: str = ""  # `stands` only where the sandbox says that this limit is not enforced
    fatal: Mapping[str, str] = field(default_factory=dict)  # cell: why the sandbox may end with it
    moot: Mapping[str, str] = field(default_factory=dict)  # cell: why it has no meaning there
    args: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False  # it needs a sandbox that no other test had before
    user: str = ""  # who it is inside; "": the sandbox's user

    def program(self) -> str:
        lines = textwrap.dedent(self.code).strip("\n") or "pass"
        calls = CALLS if re.search(r"\b(libc|ctypes|check|call|tried)\b", lines) else ""
        text = f"{PRELUDE}{calls}\ntry:\n{textwrap.indent(lines, '    ')}{ENDING}"
        modules = [name for name in MODULES if re.search(rf"\b{name}\.", text)]
        return f"import {', '.join(modules)}\n{text}"

    def names(self) -> set[str]:
        """Every quoted word: among them are the system calls it makes by number."""
        return set(re.findall(r"""["'](\w+)["']""", self.code))


Check = Callable[[Attempt], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    word: str  # ESCAPED, BLOCKED, ABSENT, or nothing
    what: str

    @property
    def got_out(self) -> bool:
        return self.word == "ESCAPED"


def verdict(output: str, *, signal: int = 0, killed: bool = False) -> Verdict:
    found = re.search(r"^(ESCAPED|BLOCKED|ABSENT) (.*)$", output, re.M)
    if found:
        return Verdict(found[1], found[2])
    if killed and signal:
        return Verdict("BLOCKED", f"ended by signal {signal}")
    return Verdict("", output)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    module: str
    name: str
    what: str
    proof: str
    stands: tuple[tuple[str, str], ...]
    fatal: tuple[tuple[str, str], ...]
    moot: tuple[tuple[str, str], ...]
    cells: tuple[str, ...]

    @classmethod
    def of(cls, module: str, given: Attempt, cells: tuple[str, ...]) -> Row:
        stands, fatal, moot = (
            tuple(sorted(reasons.items())) for reasons in (given.stands, given.fatal, given.moot)
        )
        return cls(module, given.name, given.what, given.proof, stands, fatal, moot, cells)


ROWS: list[Row] = []


def cases(attempts: Iterable[Attempt], cells: tuple[str, ...] = CELLS) -> pytest.MarkDecorator:
    """Every attempt in every cell; where one is known to work, a strict expected failure."""
    found = parameters(attempts, cells, _caller())
    return pytest.mark.parametrize(("attempt", "cell"), found, indirect=["cell"])


def parameters(
    attempts: Iterable[Attempt], cells: tuple[str, ...], group: str
) -> list[ParameterSet]:
    given = list(attempts)
    ROWS.extend(Row.of(group, attempt, cells) for attempt in given)
    return [
        pytest.param(a, cell, id=f"{group}-{a.name}-{cell}", marks=_marks(a, cell))
        for a in given
        for cell in cells
    ]


def again(attempts: Iterable[Attempt], cells: tuple[str, ...]) -> pytest.MarkDecorator:
    """Attempts of other modules, with a change; without CI=true in one cell."""
    params = [
        pytest.param(
            a,
            cell,
            id=f"{a.name}-{cell}",
            marks=(*_marks(a, cell), *(() if cell in STRONGEST else (pytest.mark.slow,))),
        )
        for a in attempts
        for cell in cells
    ]
    return pytest.mark.parametrize(("attempt", "cell"), params, indirect=["cell"])


def proofs(attempts: Iterable[Attempt]) -> pytest.MarkDecorator:
    params = [
        pytest.param(a, id=a.name, marks=() if a.proof == PEER else pytest.mark.needs("root"))
        for a in attempts
        if a.proof in (PEER, ALONE, ROOT)
    ]
    return pytest.mark.parametrize("attempt", params)


def scenario(
    name: str,
    what: str,
    *,
    proof: str,
    stands: Mapping[str, str] | None = None,
    moot: Mapping[str, str] | None = None,
    cells: tuple[str, ...] = CELLS,
) -> pytest.MarkDecorator:
    """For a test that is an attempt by itself: it takes `cell`, and asserts what it wants."""
    given = Attempt(name, what, proof=proof, stands=stands or {}, moot=moot or {})
    module = _caller()
    ROWS.append(Row.of(module, given, cells))
    params = [
        pytest.param(cell, id=cell, marks=_marks(given, cell, AssertionError)) for cell in cells
    ]
    return pytest.mark.parametrize("cell", params, indirect=True)


def _caller() -> str:
    """The module that asks for cases. `inspect.stack` reads the source of every frame for it."""
    return Path(sys._getframe(2).f_code.co_filename).stem.removeprefix("test_")


def _marks(
    attempt: Attempt, cell: str, raises: type[AssertionError] = GotOut
) -> tuple[pytest.MarkDecorator, ...]:
    """What stands on every machine; `inside` marks what depends on it."""
    marks = [pytest.mark.slow] if cell in LOCAL and cell not in USUAL else []
    if cell.startswith("landlock"):
        marks.append(pytest.mark.needs("landlock"))
    if reason := attempt.moot.get(cell):
        return (*marks, pytest.mark.skip(reason=reason))
    always = None if attempt.unenforced else attempt.stands.get(cell)
    if always:
        marks.append(pytest.mark.xfail(reason=always, strict=True, raises=raises))
    return tuple(marks)
