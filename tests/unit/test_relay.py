"""The real relay: a child process with pipes, before something on a Unix socket, and before a box.

Everything here is also done with the relay built with AddressSanitizer and UBSan.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from capsule.errors import UnavailableError
from capsule.link.link import AgentLink
from capsule.link.unix import NobodyListensError
from capsule.model import ExecId, ExecRequest, Template
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from capsule.providers.relay.channels import HEADER_SIZE, MAX_DATA, VERSION, WINDOW, Kind, pack
from capsule.providers.relay.mux import Mux, MuxStream
from capsule.testing.harness import ENV, Launcher, drain, opened
from tests.support import eventually
from tests.support.relays import (
    RelayProcess,
    bad_frames,
    echo,
    golden_frames,
    relayed,
    serving,
)

MIB = 1 << 20
HELLO = pack(Kind.HELLO, 0, VERSION)
GOLDEN = {frame.name: frame.wire for frame in golden_frames()}
BAD = bad_frames()


@pytest.fixture(params=["plain", "sanitized"])
def agent(request: pytest.FixtureRequest) -> Path:
    name = "agent_binary" if request.param == "plain" else "asan_agent"
    path: Path = request.getfixturevalue(name)
    return path


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, for Unix sockets, and open to the users that boxes run as."""
    path = Path(tempfile.mkdtemp(prefix="cap-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def path(run_dir: Path) -> Path:
    return run_dir / "agent.sock"


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
    """The relay has let go of every connection: only then it says CLOSE."""
    await eventually(lambda: not mux._core._channels, what="the relay has closed every channel")


async def test_bytes_go_there_and_back(agent: Path, path: Path) -> None:
    async with serving(path), relayed(agent, path) as (mux, _):
        await there_and_back(mux, b"ping")
        await there_and_back(mux, os.urandom(3 * WINDOW + 17))
        await all_closed(mux)


async def test_what_it_says_may_be_lines_of_text(agent: Path, path: Path) -> None:
    async with serving(path):
        mux = await Mux.start(await RelayProcess.start(agent, path, lines=True))
        try:
            for size in (1, 2, 3, 4, 3 * WINDOW + 17):
                await there_and_back(mux, os.urandom(size))
        finally:
            await mux.aclose()


async def test_the_golden_conversation(agent: Path, path: Path) -> None:
    async with serving(path):
        relay = await RelayProcess.start(agent, path)
        assert await relay.stdout.readexactly(HEADER_SIZE) == GOLDEN["hello"]
        await relay.send(GOLDEN["hello_newer"] + GOLDEN["open_first"] + GOLDEN["open_last"])
        await relay.send(GOLDEN["data"] + GOLDEN["data_every_byte"])
        heard = await relay.stdout.readexactly(len(GOLDEN["data"] + GOLDEN["data_every_byte"]))
        first = GOLDEN["data"] + GOLDEN["data_every_byte"]
        second = GOLDEN["data_every_byte"] + GOLDEN["data"]
        assert heard in (first, second)
        await relay.send(GOLDEN["close"])
        assert await relay.stdout.readexactly(HEADER_SIZE) == GOLDEN["close"]
        await relay.send(GOLDEN["open_first"] + GOLDEN["data"])
        assert await relay.stdout.readexactly(len(GOLDEN["data"])) == GOLDEN["data"]
        await relay.aclose()
        assert relay.process.returncode == 0
        assert await relay.stdout.read() == b""


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD.keys())
async def test_what_is_not_the_protocol_ends_it_with_a_reason(
    agent_binary: Path, path: Path, frame: bytes
) -> None:
    async with serving(path):
        relay = await RelayProcess.start(agent_binary, path)
        await relay.send(HELLO + pack(Kind.OPEN) + frame)
        assert await asyncio.wait_for(relay.process.wait(), 10) == 1
        assert b"capsule-agent relay: " in await relay.stderr.read()
        await relay.aclose()


async def test_data_beyond_the_window_ends_it(agent: Path, path: Path) -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with serving(path, deaf):
        relay = await RelayProcess.start(agent, path)
        frame = pack(Kind.DATA, 0, MAX_DATA, bytes(MAX_DATA))
        with pytest.raises(UnavailableError):
            await relay.send(HELLO + pack(Kind.OPEN))
            for _ in range(100):
                await relay.send(frame)
        assert await asyncio.wait_for(relay.process.wait(), 10) == 1
        assert b"beyond the window" in await relay.stderr.read()


@pytest.mark.parametrize("hello", [b"", HELLO], ids=["from the start", "after hello"])
async def test_garbage_on_stdin_ends_it_and_harms_nobody(
    agent: Path, path: Path, hello: bytes
) -> None:
    async with serving(path):
        for seed in range(20):
            relay = await RelayProcess.start(agent, path)
            noise = bytes((seed * 7 + i * i * (seed + 3)) % 256 for i in range(1000))
            with suppress(UnavailableError):  # it may be faster
                await relay.send(hello + noise)
            assert await asyncio.wait_for(relay.process.wait(), 10) == 1
            await relay.aclose()
        async with relayed(agent, path) as (mux, _):
            await there_and_back(mux, b"still served")


async def test_frames_that_are_almost_right_end_it_or_not_but_never_badly(
    asan_agent: Path, path: Path
) -> None:
    async with serving(path):
        for seed in range(30):
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
    """Some hundred frames of an honest host in a hurry, and a wrong one about every third time."""
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


async def test_two_hundred_channels_at_once(agent: Path, path: Path) -> None:
    async with serving(path), relayed(agent, path) as (mux, _):
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(there_and_back(mux, bytes([number]) * (1000 + 700 * number)))
        await all_closed(mux)
        assert (await mux.open())._channel.number < 200


async def test_numbers_that_are_used_again_mix_nothing_up(agent: Path, path: Path) -> None:
    """Whoever hangs up first: the agent after its answer, or the host before it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"you said " + await reader.readexactly(8))
        await writer.drain()

    async def ask(mux: Mux, name: int) -> None:
        for count in range(50):
            word = b"%03d-%04d" % (name, count)
            stream = await mux.open()
            await stream.send(word)
            if (name + count) % 3:
                assert await receive_exactly(stream, 17) == b"you said " + word
            if (name + count) % 2:
                assert await stream.receive() in (b"", b"you said " + word)
            await stream.aclose()

    async with serving(path, answer), relayed(agent, path) as (mux, _):
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            for name in range(20):
                group.create_task(ask(mux, name))
        await all_closed(mux)


async def test_a_slow_reader_is_in_nobodys_way(agent: Path, path: Path) -> None:
    """One channel has been sent far more than it reads, one is not read by the agent at all."""

    async def by_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wish = await reader.readexactly(1)
        if wish == b"f":
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        elif wish == b"d":
            await asyncio.Event().wait()
        await echo(reader, writer)

    async with serving(path, by_request), relayed(agent, path) as (mux, _):
        flooded, deaf = await mux.open(), await mux.open()
        await flooded.send(b"f")
        await deaf.send(b"d")
        stuck = asyncio.create_task(deaf.send(bytes(4 * MIB)))
        assert await flooded.receive(1) == b"\0"
        for _ in range(20):
            stream = await mux.open()
            await stream.send(b"e")
            await stream.send(b"x" * 100_000)
            assert await receive_exactly(stream, 100_000) == b"x" * 100_000
            await stream.aclose()
        assert not stuck.done()
        assert len(flooded._buffer) <= WINDOW
        assert await receive_exactly(flooded, 2 * MIB) == bytes(2 * MIB)
        await deaf.aclose()
        await flooded.aclose()
        with pytest.raises(UnavailableError):
            await stuck


@pytest.mark.slow
async def test_64_mib_through_one_channel_in_little_memory(agent_binary: Path, path: Path) -> None:
    async with serving(path), relayed(agent_binary, path) as (mux, relay):
        stream = await mux.open()
        piece = bytes(range(256)) * 1024

        async def send() -> None:
            for _ in range(64 * MIB // len(piece)):
                await stream.send(piece)

        tracemalloc.start()
        try:
            sending = asyncio.create_task(send())
            received = 0
            while received < 64 * MIB:
                chunk = await stream.receive()
                assert chunk[0] == received % 256
                received += len(chunk)
            await sending
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 8 * MIB
        assert relay.memory_peak() < 8 * MIB


async def test_the_agents_last_words_are_heard_by_a_sender_that_comes_too_late(
    agent: Path, path: Path
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(5)
        writer.write(b"no space left")
        await writer.drain()

    async with serving(path, refuse), relayed(agent, path) as (mux, _):
        stream = await mux.open()
        with pytest.raises(UnavailableError, match=r"hung up|reset"):
            async with asyncio.timeout(10):
                while True:
                    await stream.send(bytes(MAX_DATA))
        assert await stream.receive() == b"no space left"
        await stream.aclose()


async def test_an_agent_may_stop_talking_and_go_on_listening(agent: Path, path: Path) -> None:
    heard = asyncio.get_running_loop().create_future()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"that is all")
        writer.write_eof()
        heard.set_result(await reader.readexactly(7))

    async with serving(path, half), relayed(agent, path) as (mux, _):
        stream = await mux.open()
        assert await receive_exactly(stream, 11) == b"that is all"
        assert await stream.receive() == b""
        await stream.send(b"goodbye")
        assert await heard == b"goodbye"
        await stream.aclose()


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


async def test_nobody_listens(agent: Path, path: Path) -> None:
    async with relayed(agent, path) as (mux, _):
        stream = await mux.open()
        await stream.send(b"hello?")
        with pytest.raises(NobodyListensError):
            await stream.receive()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))  # and does not listen yet
            stream = await mux.open()
            with pytest.raises(NobodyListensError):
                await stream.receive()
        path.unlink()
        async with serving(path):
            await there_and_back(mux, b"now somebody does")


async def test_a_full_queue_is_waited_for(agent: Path, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        async with relayed(agent, path) as (mux, _):
            streams = [await mux.open() for _ in range(3)]
            for stream in streams:
                await stream.send(b"me")
            loop = asyncio.get_running_loop()
            listener.setblocking(False)
            for _ in streams:
                peer, _ = await loop.sock_accept(listener)
                assert await loop.sock_recv(peer, 10) == b"me"
                peer.close()
            for stream in streams:
                assert await stream.receive() == b""


async def test_the_agent_goes_while_connections_are_open(agent: Path, path: Path) -> None:
    async with relayed(agent, path) as (mux, _):
        async with serving(path):
            streams = [await mux.open() for _ in range(10)]
            for stream in streams:
                await stream.send(b"x")
                assert await stream.receive() == b"x"
        for stream in streams:
            assert await stream.receive() == b""
        path.unlink(missing_ok=True)
        stream = await mux.open()
        with pytest.raises(NobodyListensError):
            await stream.receive()
        assert mux.usable


async def test_a_killed_relay_breaks_every_stream_and_another_takes_over(
    agent: Path, path: Path
) -> None:
    async with serving(path):
        async with relayed(agent, path) as (mux, relay):
            streams = [await mux.open() for _ in range(10)]
            waiting = [asyncio.create_task(stream.receive()) for stream in streams]
            await streams[0].send(b"x")
            assert await waiting[0] == b"x"
            relay.process.kill()
            for task in waiting[1:]:
                with pytest.raises(UnavailableError, match="the relay ended"):
                    await task
            assert not mux.usable
            with pytest.raises(UnavailableError):
                await mux.open()
        async with relayed(agent, path) as (mux, _):
            await there_and_back(mux, b"as before")


async def test_a_stopped_relay_can_be_given_up(agent_binary: Path, path: Path) -> None:
    async with serving(path), relayed(agent_binary, path) as (mux, relay):
        relay.process.send_signal(signal.SIGSTOP)
        stream = await mux.open()
        await stream.send(b"?")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stream.receive()
        await stream.aclose()
        relay.process.send_signal(signal.SIGCONT)
        await there_and_back(mux, b"and may come back")


async def test_its_connections_close_when_its_stdin_ends(agent: Path, path: Path) -> None:
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        gone.set()

    async with serving(path, wait):
        relay = await RelayProcess.start(agent, path)
        await relay.send(HELLO + pack(Kind.OPEN))
        await relay.aclose()
        assert relay.process.returncode == 0
        await asyncio.wait_for(gone.wait(), 10)


async def test_it_ends_although_nobody_reads_what_it_says(agent: Path, path: Path) -> None:
    """Its stdout is full and stays so; the end of its stdin is noticed all the same."""

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    async with serving(path, flood):
        inside, outside = os.pipe()
        process = await asyncio.create_subprocess_exec(
            str(agent), "relay", str(path), stdin=asyncio.subprocess.PIPE, stdout=outside
        )
        os.close(outside)
        assert process.stdin
        process.stdin.write(HELLO + b"".join(pack(Kind.OPEN, number) for number in range(50)))
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0
        os.close(inside)


async def test_it_ends_when_nobody_can_hear_it_any_more(agent: Path, path: Path) -> None:
    inside, outside = os.pipe()
    process = await asyncio.create_subprocess_exec(
        str(agent), "relay", str(path), stdin=asyncio.subprocess.PIPE, stdout=outside
    )
    os.close(outside)
    os.close(inside)
    assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_its_arguments_and_memory_are_nobodys_business(
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
    """Whose stdin nobody ends when its engine is killed."""
    async with serving(path), relayed(agent, path) as (_, first):
        for _ in range(2):
            async with relayed(agent, path) as (mux, relay):
                assert await asyncio.wait_for(first.process.wait(), 10) == -signal.SIGKILL
                stream = await mux.open()
                await stream.send(b"echo")
                assert await stream.receive() == b"echo"
                assert relay.process.returncode is None


@pytest.fixture
async def launch(run_dir: Path, agent_binary: Path) -> AsyncIterator[Launcher]:
    settings = LocalSettings(run_dir / "data", run_dir, agent_binary)
    async with opened(LocalProvider(settings)) as provider:
        yield Launcher(provider, f"r{os.getpid()}-", Template("relayed"))


@pytest.mark.real
async def test_a_box_is_used_through_the_relay(
    launch: Launcher, run_dir: Path, agent: Path
) -> None:
    subject = await launch()
    path = run_dir / "boxes" / subject.box.handle.sandbox_id / "agent.sock"
    async with relayed(agent, path) as (mux, _):
        link = AgentLink(mux.open)
        assert (await link.ping())["execs_running"] == 0
        script = "cat; echo err >&2; exit 3"
        request = ExecRequest(("sh", "-c", script), ExecId("r1"), env=ENV, stdin=True)
        result = await link.collect(request, input=b"in" * 300_000)
        assert (result.exit.exit_code, result.stderr) == (3, b"err\n")
        assert result.stdout == b"in" * 300_000
        await link.write("file", b"f" * MIB)
        async with link.read("file") as reader:
            assert b"".join([chunk async for chunk in reader]) == b"f" * MIB
        results = await asyncio.gather(
            *(
                link.collect(ExecRequest(("echo", str(n)), ExecId(f"n{n}"), env=ENV, timeout=15.0))
                for n in range(20)
            )
        )
        assert [result.stdout for result in results] == [b"%d\n" % n for n in range(20)]
        await all_closed(mux)


@pytest.mark.real
async def test_a_program_outlives_the_relay(launch: Launcher, run_dir: Path, agent: Path) -> None:
    subject = await launch()
    path = run_dir / "boxes" / subject.box.handle.sandbox_id / "agent.sock"
    request = ExecRequest(
        ("sh", "-c", "echo one; read x; echo $x"), ExecId("long"), env=ENV, stdin=True
    )
    async with relayed(agent, path) as (mux, relay):
        async with await AgentLink(mux.open).exec(request) as stream:
            assert await anext(aiter(stream))
            relay.process.kill()
            with pytest.raises(UnavailableError):
                await drain(stream)
    async with relayed(agent, path) as (mux, _):
        link = AgentLink(mux.open)
        await link.send_input(ExecId("long"), b"two\n", eof=True)
        async with await link.attach(ExecId("long")) as stream:
            assert b"".join((await drain(stream)).values()) == b"one\ntwo\n"
