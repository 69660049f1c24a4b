"""A step has exactly what programs had written when it was made, however they wrote it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from capsule.errors import CapsuleError
from capsule.link.exec_stream import Output
from capsule.providers.local.layers import Parser
from capsule.service import ExecCall, Service
from tests.unit.test_service_real import folder, serving
from tests.unit.test_snapshots_real import sh
from tests.unit.test_steps_real import stepping

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]
__all__ = ["folder"]

TREE = "for i in 1 2 3; do mkdir d$i; for k in 1 2 3; do echo $i $k > d$i/f$k; done; done"
START = f"{TREE}; head -c 300000 /dev/zero | tr '\\0' . > d1/big; sleep 0.05"
LISTING = "find . -type f -printf '%P %m %s\n' | sort; find . -type f -exec sha1sum {} + | sort"
# Runs each line that it is sent, and answers. It keeps files open or mapped between execs.
WRITER = """
import ctypes, json, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)

def map(path):
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)

def write(place, text):
    place[5000 : 5000 + len(text)] = text

os.write(1, b"ready\\n")
for line in sys.stdin:
    exec(json.loads(line))
    os.write(1, b"done\\n")
"""

ROUNDS: dict[str, tuple[str, ...]] = {
    "unlinked and linked while open": (
        "file = open('d1/f1', 'r+b', buffering=0)",
        "os.link('d1/f1', 'd2/other'); os.unlink('d1/f1')",
        "file.write(b'written later')",
    ),
    "a file that had no name": (
        "fd = os.open('d1', os.O_TMPFILE | os.O_RDWR, 0o600); os.write(fd, b'one')\n"
        "libc.linkat(-100, b'/proc/self/fd/%d' % fd, -100, b'd2/named', 0x400)",
        "os.write(fd, b'two')",
    ),
    "the old one kept beside the new": (
        "file = open('d1/f1', 'ab', buffering=0)",
        "os.link('d1/f1', 'd1/f1~'); open('d1/t', 'w').write('new'); os.rename('d1/t', 'd1/f1')",
        "file.write(b'to the old one')",
    ),
    "mapped": (
        "place = map('d1/big'); write(place, b'one')",
        "write(place, b'two')",
        "write(place, b'three'); place.close()",
    ),
    "mapped, and moved": (
        "os.mkdir('n'); os.rename('d1/big', 'n/big'); place = map('n/big'); write(place, b'one')",
        "os.rename('n', 'moved')",
        "write(place, b'two')",
        "os.rename('moved/big', 'd2/big'); write(place, b'three')",
    ),
}


class Writer:
    """A program in a sandbox. Notes the files that each step is to have."""

    def __init__(
        self, service: Service, id: str, exec_id: str, output: AsyncIterator[object]
    ) -> None:
        self._service = service
        self._id = id
        self._exec = exec_id
        self._output = output
        self._seen: dict[int, tuple[str, str]] = {}

    async def ready(self) -> None:
        async for item in self._output:
            if isinstance(item, Output):
                assert item.data in (b"ready\n", b"done\n"), item.data.decode()
                return
        raise AssertionError("the program has ended")

    async def do(self, code: str) -> None:
        await self._service.send_input(self._id, self._exec, json.dumps(code).encode() + b"\n")
        await self.ready()
        tree = await sh(self._service, self._id, LISTING)
        self._seen[self._service.steps.list(self._id)[-1].number] = (code, tree)

    async def check(self) -> None:
        for number, (code, tree) in self._seen.items():
            await expect(self._service, self._id, number, LISTING, tree, f"after {code}")


@asynccontextmanager
async def writing(service: Service, id: str) -> AsyncIterator[Writer]:
    call = ExecCall(("python3", "-uc", WRITER))
    async with await service.start(id, call, stdin_open=True) as running:
        writer = Writer(service, id, running.exec_id, aiter(running))
        try:
            await writer.ready()
            yield writer
        finally:
            await service.kill(id, running.exec_id)


async def expect(
    service: Service, id: str, number: int, look: str, seen: str, why: str = ""
) -> None:
    """A fork of this step shows these files."""
    (other,) = await service.fork(id, 1, at=number)
    try:
        assert await sh(service, other.id, look) == seen, why
    finally:
        await service.delete(other.id)


@pytest.mark.parametrize("over", [False, True], ids=["first-box", "over-layers"])
@pytest.mark.parametrize("name", ROUNDS)
async def test_a_step_has_what_a_running_program_has_written(
    folder: Path, name: str, over: bool
) -> None:
    async with serving(folder, disk_backing="memory" if over else "auto") as service:
        id = await stepping(service, START, template="python")
        if over:
            await service.steps.undo(id, 1)
        async with writing(service, id) as writer:
            for code in ROUNDS[name]:
                # Not within one tick of the file system's clock.
                await writer.do(f"import time; time.sleep(0.02)\n{code}")
            await writer.check()


async def test_a_step_has_a_file_under_all_its_names(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(
            service,
            f"{TREE}; ln d1/f1 d2/other; sleep 0.05",
            "true",
            "echo again > d1/f1; rm d1/f1",
            "ln d3/f3 d3/more",
            "true",
            "echo third >> d3/more",
        )
        await expect(service, id, 3, "cat d2/other; test ! -e d1/f1", "again\n")
        same = "test d3/f3 -ef d3/more && cat d3/f3"
        await expect(service, id, 6, same, "3 3\nthird\n")
        await expect(service, id, 5, same, "3 3\n")


async def test_a_step_after_one_that_failed_has_its_changes_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Parser) -> None:
        raise CapsuleError("no space")

    async with serving(folder) as service:
        id = await stepping(service, f"{TREE}; sleep 0.05")
        with monkeypatch.context() as patch:
            patch.setattr(Parser, "end", fail)
            await sh(service, id, "echo lost > d1/f1; sleep 0.05")
        assert len(service.steps.list(id)) == 2, "that step is missing"
        await sh(service, id, "echo other > d2/f2")
        await expect(service, id, 2, "cat d1/f1 d2/f2", "lost\nother\n")
