"""Streams over Unix sockets under both event loops, and connections made ahead of their use."""

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
from capsule.link import ahead
from capsule.link.ahead import Ahead
from capsule.link.unix import NobodyListensError, UnixStream, connect_unix
from tests.support import eventually

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
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.chdir(tmp_path)  # the path of a Unix socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        listener.listen(16)
        yield listener


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
async def test_bytes_go_both_ways_and_the_end_stays_the_end(server: socket.socket) -> None:
    async with connected(server) as (stream, peer):
        await stream.send(b"ping")
        assert peer.recv(100) == b"ping"
        peer.send(b"abcdef")
        peer.close()
        assert [await stream.receive(4), await stream.receive(4)] == [b"abcd", b"ef"]
        assert [await stream.receive(), await stream.receive()] == [b"", b""]
        with pytest.raises(UnavailableError):
            await stream.send(b"anyone?")


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
        loop = asyncio.get_running_loop()
        received = bytearray()
        while len(received) < len(data):
            assert not sending.done() or len(received) > 1 << 20, "no socket holds so much"
            received += await loop.sock_recv(peer, 1 << 20)
        await sending
        assert bytes(received) == data


@both_loops
async def test_closing_wakes_what_waits_and_can_be_repeated(server: socket.socket) -> None:
    async with connected(server) as (stream, _):
        receiving = asyncio.ensure_future(stream.receive())
        sending = asyncio.ensure_future(stream.send(bytes(8 << 20)))
        for _ in range(10):
            await asyncio.sleep(0)  # both wait now
        await stream.aclose()
        await stream.aclose()
        for task in (receiving, sending, stream.receive(), stream.send(b"x")):
            with pytest.raises(UnavailableError):
                await task


@both_loops
async def test_where_nothing_listens_is_unavailable(server: socket.socket) -> None:
    Path("file").touch()
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind("closed")
    for path in ("missing", "closed", "file", "x" * 120):
        with pytest.raises(UnavailableError):
            await connect_unix(path, timeout=5)


# Connections made ahead


class Peers:
    """The connections that a server has been asked for so far."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        listener.setblocking(False)
        self.made: list[socket.socket] = []

    def count(self) -> int:
        try:
            while True:
                peer = self._listener.accept()[0]
                peer.setblocking(False)
                self.made.append(peer)
        except BlockingIOError:
            return len(self.made)

    async def are(self, count: int) -> None:
        await eventually(lambda: self.count() == count, what=f"{count} connections")

    def close(self) -> None:
        for peer in self.made:
            peer.close()


@pytest.fixture
def peers(server: socket.socket) -> Iterator[Peers]:
    peers = Peers(server)
    yield peers
    if server.fileno() >= 0:
        peers.count()
    peers.close()


@pytest.fixture
def way(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ahead]:
    monkeypatch.setattr(ahead, "AGAIN", 1e6)  # however slow the machine is
    monkeypatch.setattr(ahead, "IDLE", 60.0)
    way = Ahead("s")
    yield way
    way.close()


async def use(way: Ahead, times: int) -> None:
    for _ in range(times):
        (await way.connect()).close()


async def test_the_third_connection_is_there_before_it_is_wanted(way: Ahead, peers: Peers) -> None:
    await use(way, 1)
    await asyncio.sleep(0)  # when a second use would prepare one
    assert peers.count() == 1
    await use(way, 1)
    await peers.are(3)
    stream = await way.connect_last()
    await stream.send(b"hello")
    assert peers.made[2].recv(5) == b"hello"
    stream.close()
    await asyncio.sleep(0)
    assert peers.count() == 3, "none is made after the last"


async def test_a_dead_connection_is_not_handed_out(
    way: Ahead, peers: Peers, server: socket.socket
) -> None:
    await use(way, 2)
    await peers.are(3)
    peers.close()
    (await way.connect()).close()
    await peers.are(5)  # one in place of the dead one, and one ahead
    peers.close()
    server.close()
    with pytest.raises(NobodyListensError):
        await way.connect()
    way.expect()  # is no error
    with pytest.raises(NobodyListensError):
        await way.connect_last()


async def test_an_unused_connection_is_closed(
    way: Ahead, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "IDLE", 0.05)
    way.expect()
    way.expect()  # one is enough
    await peers.are(1)
    assert await asyncio.get_running_loop().sock_recv(peers.made[0], 1) == b""
