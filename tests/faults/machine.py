"""A server that can be killed and started again, and the questions asked after every fault.

    async with running(nursery) as machine:
        …

ends with the whole list of `security.md` §5: health is 200, processes, cgroups, mounts, folders
and store agree, descriptors and tasks are back to where they were, nothing complains in the log;
and again after everything was deleted, and after a graceful stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.footprint import Footprint, links, look, names_in, now, records_of
from tests.support import clean_env, eventually, free_port, listens
from tests.support.folders import share_roots
from tests.support.nursery import Nursery

COMPLAINTS = re.compile(
    r"never retrieved|never awaited|Traceback|incident |failed unexpectedly|\"level\": \"error\""
)
START_WITHIN = 30.0
SETTLE_WITHIN = 10.0


class Machine:
    def __init__(self, nursery: Nursery, base: Path, **settings: str) -> None:
        self.nursery = nursery
        self.base = base
        self.since = now()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pid = 0
        self.tolerated: list[str] = []  # complaints that a fault is meant to cause
        # Descriptors more than at the start: SQLite keeps one of the store for its next checkpoint.
        self.spare = 1
        self.how: dict[str, Any] = {}  # to start the server with; see nursery_main.py
        named = {
            "PORT": str(self.port),
            "DATA_DIR": str(base / "data"),
            "RUN_DIR": str(base / "run"),
            "DRAIN_TIMEOUT": "5",
            "LOG_FORMAT": "json",
            **settings,
        }
        if agent := os.environ.get("CAPSULE_AGENT"):
            named["AGENT"] = agent
        whose = clean_env() if nursery.user is None else nursery.user.env
        self.env = {**whose, **{f"CAPSULE_{name}": value for name, value in named.items()}}

    async def start(self) -> None:
        """Returns when it answers."""
        self.spawn()
        await self.answering()

    def spawn(self) -> None:
        self.pid = self.nursery.serve(
            self.base / "log",
            env=self.env,
            cwd=str(self.base),
            watch=str(self.base / "watch"),
            **self.how,
        )

    async def answering(self) -> None:
        async def answers() -> bool:
            if not listens(self.port):  # most of the time that is so, and cheaper to see
                assert self.code() is None, f"it ended with {self.code()}:\n{self.log()[-3000:]}"
                return False
            with suppress(httpx.TransportError):
                return await self.health() == 200
            return False

        await eventually(answers, what="the server answers", within=START_WITHIN)

    async def health(self) -> int:
        async with self.http(timeout=5) as http:
            return (await http.get("/health")).status_code

    def code(self) -> int | None:
        return self.nursery.code(self.pid)

    async def ended(self, within: float = 15.0) -> int:
        """Its exit code, once it has one."""
        await eventually(lambda: self.code() is not None, what="the server ends", within=within)
        code = self.code()
        assert code is not None
        return code

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL

    async def stop(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return await self.ended()

    def http(self, timeout: float = 30.0, **options: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        # Loading certificates, for plain HTTP, would take longer than most requests here.
        options = {"limits": limits, "trust_env": False, "verify": False, **options}
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, **options)

    def log(self) -> str:
        return (self.base / "log").read_text(errors="replace")

    def complaints(self) -> list[str]:
        lines = [line for line in self.log().splitlines() if COMPLAINTS.search(line)]
        return [line for line in lines if not any(t in line for t in self.tolerated)]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory(self) -> int:
        """Resident bytes of the server itself."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    async def tasks(self) -> list[str]:
        answer: list[str] = await self.ask("tasks")
        return answer

    async def set_clock(self, ahead: float) -> None:
        await self.ask(f"clock {ahead}")

    async def ask(self, question: str) -> Any:
        """The thread in the server's process; see nursery_main.py."""
        reader, writer = await asyncio.open_unix_connection(str(self.base / "watch"))
        writer.write(question.encode() + b"\n")
        answer = json.loads(await reader.readline())
        writer.close()
        await writer.wait_closed()
        return answer

    def footprint(self) -> Footprint:
        serving = self.pid if self.code() is None else None
        return look(self.base, server=serving, ignored=self.not_ours(), since=self.since)

    def not_ours(self) -> frozenset[int]:
        return frozenset({os.getpid(), self.nursery.process.pid})

    def record(self, id: str) -> dict[str, Any]:
        """What the provider noted down about a box."""
        found: dict[str, Any] = json.loads((self.base / "run/boxes" / id / "box.json").read_bytes())
        return found

    def box_of(self, id: str) -> str:
        """Another one after a reset."""
        found = [body.get("box_id") for row, _, body in records_of(self.base) if row == id]
        return next(filter(None, found), id)

    async def agree(self, within: float = SETTLE_WITHIN) -> Footprint:
        """Kernel, directories, store and API agree."""
        serving = self.code() is None
        deadline = asyncio.get_running_loop().time() + within
        while True:
            seen = await asyncio.to_thread(self.footprint)
            found = seen.differences(serving=serving)
            if serving and not found and seen.rows != (listed := await self.listed()):
                found = [f"store: {seen.rows}, API: {listed}"]
            if not found:
                return seen
            late = asyncio.get_running_loop().time() > deadline
            assert not late, f"after {within} s they disagree: {found}\n{self.log()[-2000:]}"
            await asyncio.sleep(0.05)

    async def listed(self) -> dict[str, str]:
        """Sandboxes and their states, as the API says."""
        async with self.http() as http:
            answer = await http.get("/v1/sandboxes")
        return {each["id"]: each["state"] for each in answer.json()["sandboxes"]}

    async def delete_all(self) -> None:
        async with self.http() as http:
            for id in await self.listed():
                answer = await http.delete(f"/v1/sandboxes/{id}")
                assert answer.status_code in (200, 404, 410), answer.text


@asynccontextmanager
async def running(nursery: Nursery, **settings: str) -> AsyncIterator[Machine]:
    """A machine with a server on it; `settings` as for `real_server`."""
    async with machine(nursery, **settings) as made, checked(made):
        yield made


@asynccontextmanager
async def checked(machine: Machine) -> AsyncIterator[None]:
    """A server runs during the block; afterwards all the questions are asked."""
    await machine.start()
    before, tasks = machine.descriptors(), await machine.tasks()
    yield
    if machine.code() is not None:
        await machine.start()
    assert await machine.health() == 200
    await machine.agree()
    await machine.delete_all()
    await machine.agree()
    await settled(machine, before, tasks)
    assert await machine.stop() == 0
    seen = await asyncio.to_thread(machine.footprint)  # on the loop, each look at a file is watched
    assert seen.differences(serving=False) == []
    assert seen.rows == {}
    assert machine.complaints() == []


async def settled(machine: Machine, descriptors: int, tasks: list[str]) -> None:
    """Back to where they were within ten seconds."""
    counts: list[Any] = []

    async def back() -> bool:
        counts[:] = machine.descriptors(), await machine.tasks()
        return counts[0] <= descriptors + machine.spare and len(counts[1]) <= len(tasks)

    deadline = asyncio.get_running_loop().time() + SETTLE_WITHIN
    while not await back():
        late = asyncio.get_running_loop().time() > deadline
        assert not late, f"was {descriptors} fds, {tasks}; is {counts}, {links(machine.pid)}"
        await asyncio.sleep(0.05)


@asynccontextmanager
async def machine(
    nursery: Nursery, kind: Callable[..., Machine] = Machine, /, **settings: str
) -> AsyncIterator[Machine]:
    """One without a server yet. Whatever happens, nothing is left of it."""
    home = "/tmp" if nursery.user is None else str(nursery.user.home)
    base = Path(tempfile.mkdtemp(prefix="cf-", dir=home))  # short: sockets are bound below
    base.chmod(0o755)
    if nursery.user is not None and os.getuid() == 0:
        os.chown(base, nursery.user.uid, nursery.user.uid)
    if nursery.user is None:
        share_roots(base / "data")
    made = kind(nursery, base, **settings)
    try:
        yield made
    finally:
        await end_all(made)
        await asyncio.to_thread(shutil.rmtree, base, ignore_errors=True)


async def end_all(machine: Machine) -> None:
    """Also after a test that failed halfway: a last server removes what is left."""
    if machine.pid:
        machine.env["CAPSULE_DRAIN"] = "delete"
        if machine.code() is None:
            await machine.kill()
        if names_in(machine.base / "run/boxes"):
            machine.how = {}
            machine.spawn()
            with suppress(AssertionError, pytest.fail.Exception):
                await machine.answering()
                await machine.stop()
        if machine.code() is None:
            await machine.kill()
