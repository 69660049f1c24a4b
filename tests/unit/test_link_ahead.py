"""Connections made ahead: used when they are wanted, never when they are dead, never kept."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.link import ahead
from capsule.link.ahead import Ahead
from capsule.link.unix import NobodyListensError
from tests.support import eventually


class Server:
    """Accepts whoever has connected, when it is asked how many have."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("s")
        self.listener.listen(16)
        self.listener.setblocking(False)
        self.peers: list[socket.socket] = []

    def count(self) -> int:
        try:
            while True:
                self.peers.append(self.listener.accept()[0])
        except BlockingIOError:
            return len(self.peers)

    async def has(self, count: int) -> None:
        await eventually(lambda: self.count() == count, what=f"{count} connections")

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.chdir(tmp_path)  # the path of a Unix socket is short
    server = Server()
    yield server
    if server.listener.fileno() >= 0:
        server.count()
    server.close()
    server.listener.close()


@pytest.fixture
def way(server: Server) -> Iterator[Ahead]:
    way = Ahead("s")
    yield way
    way.close()


async def use(way: Ahead, times: int) -> None:
    for _ in range(times):
        (await way.connect()).close()


async def test_one_use_prepares_nothing(way: Ahead, server: Server) -> None:
    await use(way, 1)
    await asyncio.sleep(0)  # when a second use would have prepared one
    assert server.count() == 1


async def test_the_next_one_is_there_before_it_is_wanted(way: Ahead, server: Server) -> None:
    await use(way, 2)
    await server.has(3)
    stream = await way.connect()
    await stream.send(b"hello")
    assert server.peers[2].recv(5) == b"hello"
    stream.close()


async def test_a_dead_one_is_not_handed_out(way: Ahead, server: Server) -> None:
    await use(way, 2)
    await server.has(3)
    server.close()
    stream = await way.connect()
    await server.has(4)
    await stream.send(b"hello")
    assert server.peers[3].recv(5) == b"hello"
    stream.close()


async def test_the_last_is_the_one_made_ahead_and_none_follows(way: Ahead, server: Server) -> None:
    await use(way, 2)
    await server.has(3)
    stream = await way.connect_last()
    await stream.send(b"bye")
    assert server.peers[2].recv(3) == b"bye"
    stream.close()
    await asyncio.sleep(0)  # when another would have been prepared
    assert server.count() == 3


async def test_the_last_may_be_the_first(way: Ahead, server: Server) -> None:
    (await way.connect_last()).close()
    await server.has(1)


async def test_who_is_gone_is_gone(way: Ahead, server: Server) -> None:
    await use(way, 2)
    await server.has(3)
    server.close()
    server.listener.close()
    Path("s").unlink()
    with pytest.raises(NobodyListensError):
        await way.connect()


async def test_one_that_nobody_wants_is_closed(
    way: Ahead, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "IDLE", 0.05)
    await use(way, 2)
    await server.has(3)
    server.peers[2].setblocking(False)

    def ended() -> bool:
        try:
            return server.peers[2].recv(1) == b""
        except BlockingIOError:
            return False

    await eventually(ended, what="its end")


async def test_who_is_expected_finds_it_there(way: Ahead, server: Server) -> None:
    way.expect()
    way.expect()  # one is enough
    await server.has(1)
    stream = await way.connect_last()
    await stream.send(b"hello")
    assert server.peers[0].recv(5) == b"hello"
    stream.close()
    assert server.count() == 1


async def test_to_expect_somebody_where_nobody_listens_is_fine(way: Ahead, server: Server) -> None:
    server.listener.close()
    way.expect()
    with pytest.raises(NobodyListensError):
        await way.connect_last()
