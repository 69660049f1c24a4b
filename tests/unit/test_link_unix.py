"""Streams over Unix sockets under both event loops."""

from __future__ import annotations

import asyncio
import functools
import inspect
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
