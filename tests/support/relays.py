"""A real relay as a child process, what it connects to, and the golden frames of its protocol."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from capsule.errors import UnavailableError
from capsule.providers.relay.channels import Kind
from capsule.providers.relay.lines import Lines
from capsule.providers.relay.mux import Mux
from tests.support import ROOT

GOLDEN = ROOT / "spec" / "golden"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RelayProcess:
    """`capsule-agent relay` with pipes, as an engine's exec has it; the carrier of a Mux."""

    def __init__(self, process: Process, lines: Lines | None = None) -> None:
        self.process = process
        self.lines = lines
        assert process.stdin and process.stdout and process.stderr
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr

    @classmethod
    async def start(cls, agent: Path, socket: Path | str, *, lines: bool = False) -> Self:
        command = [str(agent), "relay", str(socket), *(["lines"] if lines else [])]
        # A sanitizer's report must not be taken for the relay's own exit status.
        env = {**os.environ, "ASAN_OPTIONS": "exitcode=99", "UBSAN_OPTIONS": "exitcode=99"}
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, limit=256 * 1024
            ),
            Lines() if lines else None,
        )

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while text := await self.stdout.read(max_bytes):
            if data := self.lines.feed(text.decode()) if self.lines else text:
                return data
        return b""

    async def send(self, data: bytes) -> None:
        try:
            self.stdin.write(data)
            await self.stdin.drain()
        except OSError as exc:
            raise UnavailableError(f"the relay is gone: {exc}") from exc

    async def aclose(self) -> None:
        """Its stdin ends, so it ends."""
        self.stdin.close()
        with suppress(OSError):
            await self.stdin.wait_closed()
        await asyncio.wait_for(self.process.wait(), 10)

    def memory_peak(self) -> int:
        """The most memory it ever held, in bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")


@asynccontextmanager
async def relayed(agent: Path, socket: Path | str) -> AsyncIterator[tuple[Mux, RelayProcess]]:
    """A Mux over a relay. At the end the relay has ended well, unless the test ended it."""
    relay = await RelayProcess.start(agent, socket)
    try:
        mux = await Mux.start(relay)
        try:
            yield mux, relay
        finally:
            await mux.aclose()
    finally:
        if relay.process.returncode is None:
            relay.process.kill()
            await relay.process.wait()
    complaint = await relay.stderr.read()
    assert not complaint, complaint.decode()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends everything back, and hangs up when the other side has."""
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def serving(path: Path | str, handler: Handler = echo) -> AsyncIterator[asyncio.Server]:
    """Something on a Unix socket that is no agent. Connections end with it."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (asyncio.CancelledError, OSError):
            pass  # asyncio's own server would report it
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(handle, str(path), backlog=256)
    try:
        yield server
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks))


class Golden(NamedTuple):
    name: str
    sender: str
    kind: Kind
    channel: int
    value: int
    payload: bytes
    wire: bytes


def _rows(file: str) -> Iterator[list[str]]:
    for line in (GOLDEN / file).read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            yield line.split(" ")


def golden_frames() -> list[Golden]:
    return [
        Golden(
            name,
            sender,
            Kind(int(kind)),
            int(channel),
            int(value),
            b"" if payload == "-" else bytes.fromhex(payload),
            bytes.fromhex(wire),
        )
        for name, sender, kind, channel, value, payload, wire in _rows("relay.txt")
    ]


def bad_frames() -> dict[str, bytes]:
    """What neither end may say while only channel 0 is open, by name."""
    return {name: bytes.fromhex(wire) for name, wire in _rows("relay_bad.txt")}
