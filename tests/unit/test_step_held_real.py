"""Programs that keep files open or mapped from one exec to the next, and write to them where nobody
hears of it: a step has what they wrote."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from capsule.link.exec_stream import Output
from capsule.service import ExecCall, Service
from tests.support import backends
from tests.unit.test_service_real import folder, serving
from tests.unit.test_snapshots_real import sh
from tests.unit.test_steps_real import stepping

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]
__all__ = ["folder"]

TREE = "for i in 1 2 3; do mkdir d$i; for k in 1 2 3; do echo $i $k > d$i/f$k; done; done"
START = f"{TREE}; head -c 300000 /dev/zero | tr '\\0' . > d1/big; sleep 0.05"
LISTING = "find . -type f -printf '%P %m %s\n' | sort; find . -type f -exec sha1sum {} + | sort"
# Does what it is told, a line each, and says so.
PUPPET = """
import ctypes, json, mmap, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SIZE = 300000

def map(path, rights=3):
    fd = os.open(path, os.O_RDWR)
    place = libc.mmap(None, SIZE, rights, 1, fd, 0)
    os.close(fd)
    return place

def write(place, text):
    ctypes.memmove(place + 5000, text, len(text))

def obey():
    os.write(1, b"ready\\n")
    for line in sys.stdin:
        exec(json.loads(line), globals())
        os.write(1, b"done\\n")

if sys.argv[1:]:  # the first thread ends, and the others go on
    threading.Thread(target=obey).start()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
obey()
"""


class Puppet:
    """Acts in a sandbox; what each step is to show is noted."""

    def __init__(
        self, service: Service, id: str, exec_id: str, said: AsyncIterator[object]
    ) -> None:
        self._service = service
        self._id = id
        self._exec = exec_id
        self._said = said
        self._seen: dict[int, tuple[str, str]] = {}

    async def ready(self) -> None:
        async for item in self._said:
            if isinstance(item, Output):
                assert item.data in (b"ready\n", b"done\n"), item.data.decode()
                return
        raise AssertionError("it has ended")

    async def do(self, code: str) -> None:
        await self._service.send_input(self._id, self._exec, json.dumps(code).encode() + b"\n")
        await self.ready()
        tree = await sh(self._service, self._id, LISTING)
        self._seen[self._service.steps.list(self._id)[-1].number] = (code, tree)

    async def check(self) -> None:
        for number, (code, tree) in self._seen.items():
            (other,) = await self._service.fork(self._id, 1, at=number)
            assert await sh(self._service, other.id, LISTING) == tree, f"after {code}"
            await self._service.delete(other.id)


@asynccontextmanager
async def puppet(service: Service, id: str, *how: str) -> AsyncIterator[Puppet]:
    call = ExecCall(("python3", "-uc", PUPPET, *how))
    async with await service.start(id, call, stdin_open=True) as running:
        puppet = Puppet(service, id, running.exec_id, aiter(running))
        try:
            await puppet.ready()
            yield puppet
        finally:
            await service.kill(id, running.exec_id)


ROUNDS: dict[str, tuple[str, ...]] = {
    "linked and unlinked while open": (
        "file = open('d1/f1', 'r+b', buffering=0)",
        "os.link('d1/f1', 'd2/other'); os.unlink('d1/f1')",
        "file.write(b'written later')",
        "file.write(b'and more'); file.close()",
    ),
    "a file that had no name": (
        "fd = os.open('d1', os.O_TMPFILE | os.O_RDWR, 0o600); os.write(fd, b'one')\n"
        "libc.linkat(-100, b'/proc/self/fd/%d' % fd, -100, b'd2/named', 0x400)",
        "os.write(fd, b'two')",
        "os.write(fd, b'three'); os.close(fd)",
    ),
    "the old one kept beside the new": (
        "file = open('d1/f1', 'ab', buffering=0)",
        "os.link('d1/f1', 'd1/f1~'); open('d1/t', 'w').write('new'); os.rename('d1/t', 'd1/f1')",
        "file.write(b'to the old one')",
    ),
    "mapped": (
        "place = map('d1/big'); write(place, b'one')",
        "write(place, b'two')",
        "write(place, b'three')",
        "write(place, b'four'); libc.munmap(place, SIZE)",
    ),
    "mapped, and unmapped in the same exec": (
        "place = map('d1/big'); ctypes.string_at(place, SIZE); write(place, b'one')\n"
        "libc.munmap(place, SIZE)",
        "place = map('d1/big'); ctypes.string_at(place, SIZE); write(place, b'two')\n"
        "libc.munmap(place, SIZE)",
    ),
    "closed to writing for a while": (
        "place = map('d1/big'); write(place, b'one'); libc.mprotect(place, SIZE, 1)",
        "libc.mprotect(place, SIZE, 3); write(place, b'two')",
        "libc.mprotect(place, SIZE, 1)",
        "libc.mprotect(place, SIZE, 3); write(place, b'three'); libc.mprotect(place, SIZE, 1)",
        "libc.mprotect(place, SIZE, 3); write(place, b'four'); libc.munmap(place, SIZE)",
    ),
    "opened to be written to later": (
        "place = map('d1/big', 1); ctypes.string_at(place, SIZE)",
        "libc.mprotect(place, SIZE, 3); write(place, b'one')",
        "libc.mprotect(place, SIZE, 3); write(place, b'two'); libc.mprotect(place, SIZE, 1)",
    ),
    "mapped under a name that is no more": (
        "place = map('d1/big'); write(place, b'one')",
        "os.link('d1/big', 'd2/other'); os.unlink('d1/big')",
        "write(place, b'two')",
        "write(place, b'three'); libc.munmap(place, SIZE)",
    ),
    "mapped under a strange name": (
        r"name = 'd1/a\n\\012 (deleted)'; os.rename('d1/big', name)",
        "place = map(name); write(place, b'one')",
        "write(place, b'two')",
        "write(place, b'three'); libc.munmap(place, SIZE)",
    ),
    "mapped, and moved": (
        "os.mkdir('n'); os.rename('d1/big', 'n/big'); place = map('n/big'); write(place, b'one')",
        "os.rename('n', 'moved')",
        "write(place, b'two')",
        "os.rename('moved/big', 'd2/big'); write(place, b'three')",
        "write(place, b'four'); libc.munmap(place, SIZE)",
    ),
}

KINDS = [(over, backing) for over in (False, True) for backing in ("auto", "memory")]
MAPPED = "mapped under a name that is no more"
CASES = [(name, *kind) for name in ROUNDS for kind in KINDS if name != MAPPED or not kind[0]]


async def play(folder: Path, name: str, over: bool, backing: str, *how: str) -> None:
    async with serving(folder, disk_backing=backing) as service:
        if backends.of(folder).name != "local":
            pytest.skip("in containers a step may have it as it was before")
        id = await stepping(service, START, template="python")
        if over:
            await service.steps.undo(id, 1)
        async with puppet(service, id, *how) as it:
            for code in ROUNDS[name]:
                await it.do(f"import time; time.sleep(0.02)\n{code}")
            await it.check()


@pytest.mark.parametrize(("name", "over", "backing"), CASES)
async def test_a_step_has_what_was_written_where_nobody_hears_of_it(
    folder: Path, name: str, over: bool, backing: str
) -> None:
    await play(folder, name, over, backing)


@pytest.mark.parametrize(("over", "backing"), KINDS)
async def test_a_program_whose_first_thread_has_ended_is_looked_at(
    folder: Path, over: bool, backing: str
) -> None:
    await play(folder, "mapped", over, backing, "thread")
