"""The Unix stream: against a plain socket on the other side, under both event loops."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from capsule.errors import UnavailableError
from capsule.link.unix import UnixStream, connect_unix

Pair = tuple[UnixStream, socket.socket]


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs it under asyncio and under uvloop, with the fixtures it asks for."""

    @functools.wraps(test)
    def run(new_loop: Callable[[], asyncio.AbstractEventLoop], **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(**fixtures))

    own = inspect.signature(test)
    extra = inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY)
    parameters = [*own.parameters.values(), extra]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    del run.__wrapped__  # or pytest takes it for a coroutine
    loops: Callable[[Any], Callable[..., None]] = pytest.mark.parametrize(
        "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )
    return loops(run)


@pytest.fixture
def server(short_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        listener.listen(16)
        yield listener


@pytest.fixture
def short_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a Unix socket has at most 107 bytes: go there, and use a relative one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@asynccontextmanager
async def connected(server: socket.socket) -> AsyncIterator[Pair]:
    stream = await connect_unix("s", timeout=5)
    peer, _ = server.accept()
    peer.setblocking(False)
    try:
        yield stream, peer
    finally:
        await stream.aclose()
        peer.close()


@both_loops
async def test_bytes_go_both_ways(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        await stream.send(b"ping")
        assert peer.recv(100) == b"ping"
        peer.send(b"pong")
        assert await stream.receive() == b"pong"


@both_loops
async def test_the_end_stays_the_end(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        peer.send(b"last")
        peer.close()
        assert await stream.receive() == b"last"
        assert await stream.receive() == b""
        assert await stream.receive() == b""


@both_loops
async def test_no_more_than_asked_for(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        peer.send(b"abcdef")
        assert [await stream.receive(4), await stream.receive(4)] == [b"abcd", b"ef"]


@both_loops
async def test_a_cancelled_receive_loses_nothing(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        waiting = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0)
        peer.send(b"data")
        stream._on_readable()  # as the loop does, in the same turn as the cancellation
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await stream.receive(2) == b"da"
        assert await stream.receive() == b"ta"


@both_loops
async def test_large_sends_wait_for_the_reader(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        data = os.urandom(4 << 20)
        sending = asyncio.ensure_future(stream.send(data))
        done, _ = await asyncio.wait({sending}, timeout=0.05)
        assert not done, "nobody has read, so nothing can have taken 4 MiB"
        loop = asyncio.get_running_loop()
        received = bytearray()
        while len(received) < len(data):
            received += await loop.sock_recv(peer, 1 << 20)
        await sending
        assert bytes(received) == data


@both_loops
async def test_nothing_is_read_ahead_of_the_consumer(server: socket.socket) -> None:
    """Backpressure: a peer whose bytes nobody takes is stopped by the kernel."""
    async with connected(server) as (stream, peer):
        peer.send(b"x")
        assert await stream.receive() == b"x"
        sent = 0
        with pytest.raises(BlockingIOError):
            while sent < 1 << 24:
                sent += peer.send(bytes(65536))
                await asyncio.sleep(0)
        assert sent < 1 << 21


@both_loops
async def test_a_flood_does_not_starve_the_loop(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        loop = asyncio.get_running_loop()
        turns = 0

        def tick() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(tick)

        flood = asyncio.ensure_future(loop.sock_sendall(peer, bytes(8 << 20)))
        tick()
        received = chunks = 0
        while received < 8 << 20:
            received += len(await stream.receive(65536))
            chunks += 1
        await flood
        assert turns >= chunks


@both_loops
async def test_a_reset_is_unavailable(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        await stream.send(b"never read")
        peer.close()
        with pytest.raises(UnavailableError):
            await stream.receive()


@both_loops
async def test_sending_to_nobody_is_unavailable(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        peer.close()
        with pytest.raises(UnavailableError):
            await stream.send(b"hello?")


@both_loops
async def test_closing_wakes_whoever_waits_and_is_idempotent(server: socket.socket) -> None:
    async with connected(server) as (stream, _):
        receiving = asyncio.ensure_future(stream.receive())
        sending = asyncio.ensure_future(stream.send(bytes(8 << 20)))
        await asyncio.sleep(0.01)
        await stream.aclose()
        await stream.aclose()
        for task in (receiving, sending):
            with pytest.raises(UnavailableError):
                await task
        with pytest.raises(UnavailableError):
            await stream.receive()
        with pytest.raises(UnavailableError):
            await stream.send(b"x")


@both_loops
async def test_closing_leaves_no_descriptor(server: socket.socket) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        stream = await connect_unix("s", timeout=5)
        server.accept()[0].close()
        assert await stream.receive() == b""
        await stream.aclose()
    assert len(os.listdir("/proc/self/fd")) == before


def missing(tmp: Path) -> str:
    return str(tmp / "nosuch")


def refusing(tmp: Path) -> str:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("refusing")
    return "refusing"


def no_socket(tmp: Path) -> str:
    (tmp / "file").touch()
    return str(tmp / "file")


def too_long(tmp: Path) -> str:
    return str(tmp / ("x" * 120))


@pytest.mark.parametrize("where", [missing, refusing, no_socket, too_long])
@both_loops
async def test_nobody_there_is_unavailable(where: Callable[[Path], str], short_dir: Path) -> None:
    with pytest.raises(UnavailableError):
        await connect_unix(where(short_dir), timeout=1)


@both_loops
async def test_a_full_queue_is_waited_for(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        listener.listen(0)
        first = await connect_unix("s", timeout=1)
        with pytest.raises(UnavailableError, match="accepts no connection"):
            await connect_unix("s", timeout=0.05)
        waiting = asyncio.ensure_future(connect_unix("s", timeout=5))
        await asyncio.sleep(0.01)
        listener.accept()[0].close()
        second = await waiting
        await first.aclose()
        await second.aclose()
