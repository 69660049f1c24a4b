"""Parts of E2B's surface that need no sandbox: listings, logs, IPython syntax, ends of streams."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import msgspec
import pytest

from capsule.edge.e2b.connect import envelope
from capsule.edge.e2b.entries import entry
from capsule.edge.e2b.listing import FEW, encoded
from capsule.edge.e2b.magics import plain
from capsule.edge.e2b.rpc import Severed, told
from capsule.edge.e2b.sandbox_logs import E2bLogEntry, Wanted, chosen
from capsule.errors import CapsuleError, GoneError, InternalError, UnavailableError
from capsule.model import ExecId, ExecInfo, Exit, FileStat, Reason
from capsule.service.execs import Begun
from tests.support.turns import turns_of_others

NOW = 1_800_000_000.0


def named(name: str) -> FileStat:
    return FileStat(name, name, "file", size=1, mode=0o644, mtime=0.0, uid=1000, gid=1000)


async def test_a_long_listing_does_not_block_the_loop() -> None:
    found = [named(str(n)) for n in range(10 * FEW)]
    async with turns_of_others() as turns:
        made = await encoded(found, lambda each: entry(each, "/d/" + each.path))
    assert turns.count >= 9
    listed = msgspec.json.decode(msgspec.json.encode(made))
    assert [each["path"] for each in listed] == [f"/d/{n}" for n in range(10 * FEW)]


async def test_a_listing_replaces_what_is_not_utf8() -> None:
    (made,) = await encoded([named("a\udcff")], lambda each: entry(each, each.path))
    assert msgspec.json.decode(made)["name"] == "a\ufffd"


def run(n: int, at: float, duration_ms: float) -> Begun:
    exit = Exit(Reason.EXITED, 0, duration_ms=duration_ms)
    info = ExecInfo(ExecId(f"e{n}"), n, ("true",), False, False, 0.0, exit, 0, 0)
    return Begun(at, info)


RUNS = [run(n, NOW + n * 0.0123456, 7.654321) for n in range(50)] + [run(99, NOW + 5, 0.1)]


def cursor(entry: E2bLogEntry) -> int:
    return int(entry.timestamp.timestamp() * 1000 + 0.01)


def key(entry: E2bLogEntry) -> tuple[str, str]:
    return entry.fields["pid"], entry.message


def test_within_a_millisecond_the_log_has_the_end_before_the_next_start() -> None:
    newest_first = [run(2, NOW + 0.0102, 3.0), run(1, NOW, 10.1)]  # as the agent lists them
    found = chosen(newest_first, Wanted())
    assert [key(each) for each in found] == [
        ("1", "Process started"),
        ("1", "Process ended"),
        ("2", "Process started"),
        ("2", "Process ended"),
    ]


def test_a_cursor_of_the_log_loses_no_entry_in_either_direction() -> None:
    forward, backward = chosen(RUNS, Wanted()), chosen(RUNS, Wanted(backward=True))
    assert len(forward) == 102 and backward == forward[::-1]
    assert [each.message for each in forward[-2:]] == ["Process started", "Process ended"]
    for n, each in enumerate(forward):
        after = chosen(RUNS, Wanted(start=cursor(each)))
        before = chosen(RUNS, Wanted(start=cursor(each), backward=True))
        assert {*map(key, forward[n:])} <= {*map(key, after)}
        assert {*map(key, forward[: n + 1])} <= {*map(key, before)}


@pytest.mark.parametrize(
    ("code", "plainly"),
    [
        ("  x = 1\n  y = 2\n", "x = 1\ny = 2\n"),
        ("\n \t\n  if x:\n    y\n\n z", "\n \t\nif x:\n  y\n\n z"),
        ("  s = '\x0b  a\x85  b\u2028  c'\r\n  t", "s = '\x0b  a\x85  b\u2028  c'\r\nt"),
        ("x = 1\n  y", "x = 1\n  y"),
        ("   \n\t\n", "   \n\t\n"),
        ("", ""),
        ("s = '''\n!ls\n'''", "s = '''\n!ls\n'''"),
        ("%matplotlib inline", "pass"),
    ],
)
def test_ipython_syntax_becomes_python(code: str, plainly: str) -> None:
    assert plain(code) == plainly


@pytest.mark.parametrize(
    "code",
    [
        " \n" * 2_000_000 + "  x",
        "".join(f"{' ' * 1000}x{n}\n" for n in range(4000)),
        "s = '''\n!ls\n'''\n" + "x = 1\n" * 600_000,
    ],
    ids=["blank lines", "deep", "long"],
)
def test_long_code_does_not_block_the_loop(code: str) -> None:
    began = time.process_time()
    plain(code)
    assert time.process_time() - began < 1


EVENT = envelope({"event": {}})


async def failing(error: CapsuleError, *before: bytes) -> AsyncGenerator[bytes, None]:
    for part in before:
        yield part
    raise error


@pytest.mark.parametrize(
    ("error", "lives", "severed"),
    [
        (GoneError("sandbox a is over"), True, True),  # it is ending
        (GoneError("sandbox a was reset", reset=True), True, False),
        (UnavailableError("sandbox a died"), False, True),
        (UnavailableError("the link was lost"), True, False),
        (InternalError("bug"), False, False),
    ],
)
async def test_only_the_end_of_a_sandbox_severs_a_stream(
    error: CapsuleError, lives: bool, severed: bool
) -> None:
    first, last = [part async for part in told(failing(error, EVENT), lambda: lives)]
    assert first == EVENT
    assert isinstance(last, Severed) is severed
    assert severed or error.message.encode() in last
