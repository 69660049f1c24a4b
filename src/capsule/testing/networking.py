"""Conformance: byte streams into a box and out of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from capsule.errors import ConflictError, InvalidError, UnavailableError
from capsule.link.stream import ByteStream
from capsule.testing.harness import Subject, drain, read_until, until

ECHO = """
import socket, sys, threading
server = socket.create_server(("127.0.0.1", 8000))
print("listening", flush=True)

def serve(peer):
    while data := peer.recv(65536):
        peer.sendall(data)
    peer.close()

while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""

CALL = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
peer.sendall(sys.argv[2].encode())
peer.shutdown(socket.SHUT_WR)
data = b""
while chunk := peer.recv(65536):
    data += chunk
print(data.decode())
"""


@asynccontextmanager
async def echo_server(subject: Subject) -> AsyncIterator[None]:
    await subject.need_sockets()
    async with await subject.start_python(ECHO) as stream:
        await read_until(stream, b"listening")
        yield


async def receive_all(stream: ByteStream, size: int | None = None) -> bytes:
    received = bytearray()
    async with asyncio.timeout(10):
        while size is None or len(received) < size:
            chunk = await stream.receive()
            if not chunk:
                break
            received += chunk
    return bytes(received)


class TestDial:
    async def test_bytes_go_both_ways(self, subject: Subject) -> None:
        async with echo_server(subject):
            stream = await subject.link.dial(8000)
            await stream.send(b"\xff\0hello")
            assert await receive_all(stream, 7) == b"\xff\0hello"
            await stream.aclose()

    async def test_much_goes_through(self, subject: Subject) -> None:
        data = os.urandom(5_000_000)
        async with echo_server(subject):
            stream = await subject.link.dial(8000)
            sending = asyncio.create_task(stream.send(data))
            assert await receive_all(stream, len(data)) == data
            await sending
            await stream.aclose()

    async def test_many_streams_at_once(self, subject: Subject) -> None:
        async def one(n: int) -> None:
            stream = await subject.link.dial(8000, "localhost")
            await stream.send(b"%03d" % n)
            assert await receive_all(stream, 3) == b"%03d" % n
            await stream.aclose()

        async with echo_server(subject):
            await asyncio.gather(*(one(n) for n in range(20)))

    async def test_the_peers_end_is_the_end(self, subject: Subject) -> None:
        await subject.need_sockets()
        code = (
            "import socket\n"
            "server = socket.create_server(('127.0.0.1', 8001))\n"
            "print('up')\n"
            "peer = server.accept()[0]\n"
            "peer.sendall(b'bye')\n"
            "peer.close()\n"
        )
        async with await subject.start_python(code) as server:
            await read_until(server, b"up")
            stream = await subject.link.dial(8001)
            assert await receive_all(stream) == b"bye"
            await stream.aclose()

    async def test_nobody_listening_is_unavailable(self, subject: Subject) -> None:
        await subject.need_sockets()
        with pytest.raises(UnavailableError):
            await subject.link.dial(9)

    @pytest.mark.parametrize("port", [0, -1, 65_536, 10**12])
    async def test_a_port_that_is_none_is_invalid(self, subject: Subject, port: int) -> None:
        with pytest.raises(InvalidError):
            await subject.link.dial(port)

    @pytest.mark.parametrize("host", ["10.0.0.1", "169.254.169.254", "example.com", "0.0.0.0"])
    async def test_only_the_boxes_own_ports_can_be_dialled(
        self, subject: Subject, host: str
    ) -> None:
        with pytest.raises(InvalidError):
            await subject.link.dial(80, host)

    async def test_the_hosts_own_ports_are_not_the_boxes(self, subject: Subject) -> None:
        await subject.need_sockets()
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(UnavailableError):
                await subject.link.dial(port)


class TestListen:
    async def test_a_connection_made_inside_arrives_here(self, subject: Subject) -> None:
        await subject.need_sockets()
        async with subject.link.listen(3128) as connections:
            async with await subject.start_python(CALL, "3128", "question") as program:
                stream = await anext(connections)
                assert await receive_all(stream) == b"question"
                await stream.send(b"answer")
                await stream.aclose()
                assert b"answer" in b"".join((await drain(program)).values())

    async def test_several_at_once(self, subject: Subject) -> None:
        await subject.need_sockets()
        async with subject.link.listen(3128) as connections:
            programs = [await subject.start_python(CALL, "3128", f"q{n}") for n in range(3)]
            for _ in programs:
                stream = await anext(connections)
                await stream.send(b"to " + await receive_all(stream))
                await stream.aclose()
            for n, program in enumerate(programs):
                assert f"to q{n}".encode() in b"".join((await drain(program)).values())
                await program.aclose()

    async def test_a_port_in_use_is_a_conflict(self, subject: Subject) -> None:
        async with echo_server(subject):
            with pytest.raises(ConflictError):
                async with subject.link.listen(8000):
                    pass

    async def test_leaving_frees_the_port(self, subject: Subject) -> None:
        await subject.need_sockets()
        async with subject.link.listen(3128):
            pass

        async def refused() -> bool:
            return b"refused" in (await subject.python(CALL, "3128", "x")).stderr

        await until(refused, what="nobody listens any more")
        async with subject.link.listen(3128):
            pass
