"""The real relay: a child process with pipes, in front of something on a Unix socket.

Most is also tried with the relay built with AddressSanitizer and UBSan. Boxes behind a relay are
in the contract suite.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from capsule.errors import UnavailableError
from capsule.providers.relay.channels import MAX_DATA, VERSION, WINDOW, Kind, pack
from capsule.providers.relay.mux import Mux, MuxStream
from tests.support import eventually
from tests.support.relays import (
    RelayProcess,
    bad_frames,
    echo,
    relayed,
    serving,
)

MIB = 1 << 20
HELLO = pack(Kind.HELLO, 0, VERSION)


@pytest.fixture(params=["plain", "sanitized"])
def agent(request: pytest.FixtureRequest) -> Path:
    name = "agent_binary" if request.param == "plain" else "asan_agent"
    path: Path = request.getfixturevalue(name)
    return path


async def receive_exactly(stream: MuxStream, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = await stream.receive(min(size - len(received), 65536))
        assert piece, f"it ended after {len(received)} of {size} bytes"
        received += piece
    return bytes(received)


async def there_and_back(mux: Mux, data: bytes) -> None:
    stream = await mux.open()
    sending = asyncio.create_task(stream.send(data))
    try:
        assert await receive_exactly(stream, len(data)) == data
    finally:
        await sending
        await stream.aclose()


async def all_closed(mux: Mux) -> None:
    """The relay has let go of every connection: it sends CLOSE only then."""
    await eventually(lambda: not mux._core._channels, what="the relay has closed every channel")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the socket of what the relay connects to. A relative one: it may not be long."""
    monkeypatch.chdir(tmp_path)
    return Path("agent.sock")


@pytest.mark.parametrize("lines", [False, True], ids=["bytes", "lines of text"])
async def test_bytes_go_there_and_back(agent: Path, path: Path, lines: bool) -> None:
    async with serving(path):
        relay = await RelayProcess.start(agent, path, lines=lines)
        mux = await Mux.start(relay)
        try:
            for size in (1, 2, 3, 4, 3 * WINDOW + 17):
                await there_and_back(mux, os.urandom(size))
            await all_closed(mux)
            assert relay.memory_peak() < 8 * MIB or agent.parent.name == "asan"
        finally:
            await mux.aclose()


async def test_what_is_not_the_protocol_ends_it_with_a_reason(
    agent_binary: Path, path: Path
) -> None:
    async with serving(path):
        for name, frame in bad_frames().items():
            relay = await RelayProcess.start(agent_binary, path)
            await relay.send(HELLO + pack(Kind.OPEN) + frame)
            assert await asyncio.wait_for(relay.process.wait(), 10) == 1, name
            assert b"capsule-agent relay: " in await relay.stderr.read()
            await relay.aclose()


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(bytes(65536))
        await writer.drain()


async def test_frames_that_are_almost_right_end_it_or_not_but_never_badly(
    asan_agent: Path, path: Path
) -> None:
    async with serving(path):
        for seed in range(12):
            dice = random.Random(seed)
            frames = b"".join(_almost_right(dice, 300))
            relay = await RelayProcess.start(asan_agent, path)
            hearing = asyncio.create_task(relay.stdout.read())
            with suppress(UnavailableError):
                await relay.send(HELLO + frames)
                relay.stdin.close()
            await hearing
            status, complaint = await relay.process.wait(), await relay.stderr.read()
            assert status == (1 if complaint else 0), complaint
            assert complaint.count(b"\n") <= 1, complaint
            await relay.aclose()


def _almost_right(dice: random.Random, count: int) -> Iterator[bytes]:
    """Some hundred frames of an honest host, and a wrong one in about every third run."""
    unused = iter(range(1024))
    held: dict[int, int] = {}  # what may still be sent
    for _ in range(count):
        number = dice.choice([*held, 1023])
        size = min(dice.choice([1, 7, 5000, MAX_DATA]), held.get(number, 0))
        if dice.random() < 0.001:
            yield pack(dice.choice(list(Kind)), dice.randrange(1100), dice.randrange(99))
        elif not size or dice.random() < 0.2:
            held[fresh := next(unused)] = WINDOW
            yield pack(Kind.OPEN, fresh)
        elif dice.random() < 0.2:
            del held[number]
            yield pack(Kind.CLOSE, number)
        else:
            held[number] -= size
            yield pack(Kind.DATA, number, size, bytes(size))


async def test_numbers_that_are_used_again_mix_nothing_up(agent: Path, path: Path) -> None:
    """Either side may hang up first: the agent after its answer, or the host before it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"you said " + await reader.readexactly(8))
        await writer.drain()

    async def ask(mux: Mux, name: int) -> None:
        for count in range(25):
            word = b"%03d-%04d" % (name, count)
            stream = await mux.open()
            await stream.send(word)
            if (name + count) % 3:
                assert await receive_exactly(stream, 17) == b"you said " + word
            if (name + count) % 2:
                assert await stream.receive() in (b"", b"you said " + word)
            await stream.aclose()

    async with serving(path, answer), relayed(agent, path) as (mux, _):
        async with asyncio.TaskGroup() as group:
            for name in range(20):
                group.create_task(ask(mux, name))
        await all_closed(mux)


async def test_a_slow_reader_does_not_hold_up_others(agent: Path, path: Path) -> None:
    """One channel has been sent far more than it reads, one is not read by the agent at all."""

    async def by_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wish = await reader.readexactly(1)
        if wish == b"f":
            await flood(reader, writer)
        elif wish == b"d":
            await deaf(reader, writer)
        await echo(reader, writer)

    async with serving(path, by_request), relayed(agent, path) as (mux, _):
        flooded, stuck = await mux.open(), await mux.open()
        await flooded.send(b"f")
        await stuck.send(b"d")
        sending = asyncio.create_task(stuck.send(bytes(4 * MIB)))
        assert await flooded.receive(1) == b"\0"
        for _ in range(10):
            stream = await mux.open()
            await stream.send(b"e" + b"x" * 100_000)
            assert await receive_exactly(stream, 100_000) == b"x" * 100_000
            await stream.aclose()
        assert not sending.done()
        assert await receive_exactly(flooded, 2 * MIB) == bytes(2 * MIB)
        await stuck.aclose()
        await flooded.aclose()
        with pytest.raises(UnavailableError):
            await sending


async def test_what_was_sent_before_closing_arrives(agent: Path, path: Path) -> None:
    """All of it, although the agent begins to read when the host is long gone."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)
        listener.setblocking(False)
        async with relayed(agent, path) as (mux, _):
            stream = await mux.open()
            await stream.send(bytes(WINDOW))  # more than a socket holds
            await stream.aclose()
            await mux.open()  # the relay hears in order
            peer, _ = await loop.sock_accept(listener)
            later, _ = await loop.sock_accept(listener)
            with peer, later:
                received = 0
                while data := await loop.sock_recv(peer, 65536):
                    received += len(data)
            assert received == WINDOW


@pytest.mark.parametrize("reader", ["is stuck", "is gone"])
async def test_it_ends_with_its_stdin_or_its_stdout(agent: Path, path: Path, reader: str) -> None:
    """Its stdout may be full and stay so."""
    async with serving(path, flood):
        inside, outside = os.pipe()
        process = await asyncio.create_subprocess_exec(
            str(agent), "relay", str(path), stdin=asyncio.subprocess.PIPE, stdout=outside
        )
        os.close(outside)
        assert process.stdin
        if reader == "is stuck":
            process.stdin.write(HELLO + b"".join(pack(Kind.OPEN, number) for number in range(50)))
            process.stdin.close()
            assert await asyncio.wait_for(process.wait(), 10) == 0
        os.close(inside)
        assert await asyncio.wait_for(process.wait(), 10) == 0


@pytest.mark.needs("root")
async def test_programs_see_neither_its_arguments_nor_its_memory(
    agent_binary: Path, path: Path
) -> None:
    async with relayed(agent_binary, path) as (_, relay):
        proc = Path(f"/proc/{relay.process.pid}")
        assert proc.joinpath("cmdline").read_bytes().strip(b"\0") == b""
        assert proc.joinpath("comm").read_text() == "relay\n"
        assert proc.joinpath("mem").stat().st_uid == 0
        status = proc.joinpath("status").read_text().split("\n")
        held = [line.split()[1] for line in status if line.startswith(("CapEff", "CapPrm"))]
        assert set(held) == {"0" * 16}


async def test_a_relay_ends_the_one_before(agent: Path, path: Path) -> None:
    """Its stdin does not end when its engine is killed."""
    async with serving(path), relayed(agent, path) as (_, first):
        async with relayed(agent, path) as (mux, relay):
            assert await asyncio.wait_for(first.process.wait(), 10) == -signal.SIGKILL
            await there_and_back(mux, b"echo")
            assert relay.process.returncode is None
