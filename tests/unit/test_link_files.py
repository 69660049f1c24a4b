"""Files, changes, networking and the small requests over the link, against a scripted agent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule.errors import (
    ForbiddenError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
)
from capsule.link.link import AgentLink
from capsule.link.protocol import FrameType, ProtocolError
from capsule.link.watch import Change
from capsule.model import ExecId, FileStat
from capsule.testing.scripted import EXITED, Peer, ScriptedAgent
from tests.support import eventually

STAT = {
    "name": "a",
    "path": "a",
    "type": "file",
    "size": 3,
    "mode": 0o644,
    "mtime": 1.5,
    "uid": 1000,
    "gid": 1000,
    "target": None,
}
ABOUT = {"size": 6, "mode": 0o100644, "mtime": 12.5}


async def read_all(link: AgentLink, path: str = "a") -> bytes:
    async with link.read(path) as reader:
        return b"".join([chunk async for chunk in reader])


async def test_a_file_is_read_in_pieces() -> None:
    async def script(peer: Peer) -> None:
        await peer.event(ABOUT)
        await peer.data(4, b"abc")
        await peer.data(4, b"def", 3)
        await peer.reply({"bytes": 6})

    async with ScriptedAgent(script) as agent:
        async with agent.link().read("caf\udce9", offset=1, length=5) as reader:
            assert (reader.size, reader.mode, reader.mtime) == (6, 0o100644, 12.5)
            assert [chunk async for chunk in reader] == [b"abc", b"def"]
            assert [chunk async for chunk in reader] == []
    assert agent.requests == [{"op": "read", "path": "caf\udce9", "offset": 1, "length": 5}]


async def test_a_file_cut_short_on_the_way_is_never_whole() -> None:
    async def cut(peer: Peer) -> None:
        await peer.event(ABOUT)
        await peer.data(4, b"abc")

    async def lie(peer: Peer) -> None:
        await cut(peer)
        await peer.reply({"bytes": 6})

    for script in (cut, lie):
        async with ScriptedAgent(script) as agent:
            with pytest.raises(UnavailableError):
                await read_all(agent.link())


async def test_an_error_in_the_middle_of_reading_is_raised() -> None:
    async def script(peer: Peer) -> None:
        await peer.event(ABOUT)
        await peer.data(4, b"abc")
        await peer.error("internal", stage="read", errno=5)

    async with ScriptedAgent(script) as agent, agent.link().read("a") as reader:
        assert await anext(reader) == b"abc"
        with pytest.raises(Exception, match="scripted internal") as raised:
            await anext(reader)
        assert raised.value.details == {  # type: ignore[attr-defined]
            "cause": "internal", "stage": "read", "errno": "EIO", "path": "a"
        }  # fmt: skip


async def test_leaving_a_reader_early_hangs_up() -> None:
    async def script(peer: Peer) -> None:
        await peer.event(ABOUT)
        while True:
            await peer.data(4, bytes(65536))

    async with ScriptedAgent(script) as agent:
        async with agent.link().read("a") as reader:
            await anext(reader)
        await eventually(lambda: agent.open_connections == 0, what="the connection is closed")


async def test_a_silent_file_is_given_up() -> None:
    async def script(peer: Peer) -> None:
        await peer.event(ABOUT)
        await peer.gone()

    async with ScriptedAgent(script) as agent:
        with pytest.raises(UnavailableError, match="did not answer: read a"):
            await read_all(agent.link(idle=0.05))


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def writer_script(received: bytearray) -> Any:
    async def script(peer: Peer) -> None:
        while (frame := await peer.frame()) is not None and frame.type is FrameType.DATA:
            assert (frame.stream, frame.offset) == (4, len(received))
            received.extend(frame.payload)
        assert frame is not None
        assert (frame.type, frame.stream, frame.offset) == (FrameType.EOF, 4, len(received))
        await peer.reply({**STAT, "size": len(received)})

    return script


@pytest.mark.parametrize("size", [0, 1, 262_144, 262_145, 3_000_000])
async def test_bytes_are_written_whole(size: int) -> None:
    received = bytearray()
    data = os.urandom(size)
    async with ScriptedAgent(writer_script(received)) as agent:
        stat = await agent.link().write("a", data, mode=0o600, append=True)
    assert (bytes(received), stat.size) == (data, size)
    assert agent.requests == [
        {
            "op": "write",
            "path": "a",
            "mode": 0o600,
            "parents": True,
            "append": True,
            "exclusive": False,
        }
    ]


async def test_a_stream_is_written_whole() -> None:
    received = bytearray()
    async with ScriptedAgent(writer_script(received)) as agent:
        await agent.link().write("a", pieces(b"", b"abc", bytes(700_000), b"z"))
    assert bytes(received) == b"abc" + bytes(700_000) + b"z"


@pytest.mark.parametrize("code", ["no_space", "denied"])
async def test_a_refusal_in_the_middle_of_a_write_says_why(code: str) -> None:
    async def script(peer: Peer) -> None:
        for _ in range(3):
            await peer.frame()
        await peer.error(code)  # and hangs up, with most of the data unread

    async with ScriptedAgent(script) as agent:
        for data in (bytes(5_000_000), pieces(*[bytes(300_000)] * 20)):
            with pytest.raises((NoSpaceError, ForbiddenError), match=f"scripted {code}"):
                await agent.link().write("a", data)


async def test_a_refused_write_is_not_sent_to_its_end() -> None:
    """The real agent reads on after an error, so that the client sees it; we need not go on."""
    sent = 0

    async def script(peer: Peer) -> None:
        await peer.frame()
        await peer.error("no_space")
        await peer.gone()

    async def source() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield bytes(100_000)

    async with ScriptedAgent(script) as agent:
        with pytest.raises(NoSpaceError):
            await agent.link().write("a", source())
    assert sent < 100


async def test_a_source_that_fails_leaves_the_write_unfinished() -> None:
    """The agent must see no EOF, or half a file would count as whole."""
    seen = []
    arrived = asyncio.Event()

    async def script(peer: Peer) -> None:
        while (frame := await peer.frame()) is not None:
            seen.append(frame.type)
            arrived.set()

    async def source() -> AsyncIterator[bytes]:
        yield b"half"
        await arrived.wait()
        raise UnavailableError("the other sandbox went away")

    async with ScriptedAgent(script) as agent:
        with pytest.raises(UnavailableError, match="other sandbox"):
            await agent.link().write("a", source())
        await eventually(lambda: agent.open_connections == 0, what="the connection is closed")
    assert seen == [FrameType.DATA]


async def test_a_write_nobody_takes_is_given_up() -> None:
    never = asyncio.Event()

    async def script(peer: Peer) -> None:
        await never.wait()

    async with ScriptedAgent(script) as agent:
        with pytest.raises(UnavailableError, match="did not answer: write a"):
            await agent.link(idle=0.05).write("a", bytes(8_000_000))


async def test_a_listing_comes_in_parts() -> None:
    async def script(peer: Peer) -> None:
        await peer.event({"entries": [STAT, {**STAT, "name": "b"}]})
        await peer.event({"entries": []})
        await peer.event({"entries": [{**STAT, "type": "symlink", "target": "x\udcff"}]})
        await peer.reply({"truncated": True})

    async with ScriptedAgent(script) as agent:
        entries, truncated = await agent.link().list(".", recursive=True, limit=3)
    assert truncated
    assert [entry.name for entry in entries] == ["a", "b", "a"]
    assert entries[0] == FileStat("a", "a", "file", 3, 0o644, 1.5, 1000, 1000, None)
    assert entries[2].target == "x\udcff"
    assert agent.requests == [{"op": "list", "path": ".", "recursive": True, "limit": 3}]


async def test_a_listing_longer_than_asked_for_is_refused() -> None:
    async def script(peer: Peer) -> None:
        await peer.event({"entries": [STAT] * 4})
        await peer.reply({"truncated": False})

    async with ScriptedAgent(script) as agent:
        with pytest.raises(ProtocolError):
            await agent.link().list(".", limit=3)


WRONG_STATS: list[Any] = [None, [], {}, {**STAT, "size": "3"}, {**STAT, "mtime": True}]


@pytest.mark.parametrize("stat", WRONG_STATS)
async def test_an_entry_that_makes_no_sense_is_refused(stat: Any) -> None:
    async def script(peer: Peer) -> None:
        await peer.event({"entries": [stat]})
        await peer.reply({"truncated": False})

    async with ScriptedAgent(script) as agent:
        with pytest.raises(ProtocolError):
            await agent.link().list(".")


async def test_the_small_requests_are_spelled_as_the_protocol_says() -> None:
    async def script(peer: Peer) -> None:
        answers: dict[str, dict[str, Any]] = {"stat": STAT, "kill": {"running": True}}
        await peer.reply(answers.get(peer.request["op"], {}))

    async with ScriptedAgent(script) as agent:
        link = agent.link()
        assert (await link.stat("a", follow=True)).size == 3
        await link.mkdir("d", parents=False, mode=0o700)
        await link.move("a", "b", overwrite=False)
        await link.remove("d", recursive=True)
        await link.chmod("a", 0o755)
        await link.symlink("s", "t")
        assert await link.kill(ExecId("e1"), signal="TERM", grace=2.0) is True
        await link.send_input(ExecId("e1"), b"\xff\0x", eof=True)
        await link.resize(ExecId("e1"), 3, 4)
        await link.shutdown()
    assert agent.requests == [
        {"op": "stat", "path": "a", "follow": True},
        {"op": "mkdir", "path": "d", "parents": False, "mode": 0o700},
        {"op": "move", "from": "a", "to": "b", "overwrite": False},
        {"op": "remove", "path": "d", "recursive": True},
        {"op": "chmod", "path": "a", "mode": 0o755},
        {"op": "symlink", "path": "s", "target": "t"},
        {"op": "kill", "id": "e1", "signal": "TERM", "grace": 2.0},
        {"op": "input", "id": "e1", "data": "\udcff\0x", "eof": True},
        {"op": "resize", "id": "e1", "rows": 3, "cols": 4},
        {"op": "shutdown"},
    ]


async def test_large_input_goes_in_frames() -> None:
    received = bytearray()

    async def script(peer: Peer) -> None:
        if "data" not in peer.request:
            while (frame := await peer.frame()) is not None and frame.type is FrameType.DATA:
                assert frame.stream == 0
                received.extend(frame.payload)
            assert frame is not None and (frame.type, frame.stream) == (FrameType.EOF, 4)
        await peer.reply({})

    data = os.urandom(500_000)
    async with ScriptedAgent(script) as agent:
        await agent.link().send_input(ExecId("e1"), data, eof=True)
    assert bytes(received) == data
    assert agent.requests == [
        {"op": "input", "id": "e1"},
        {"op": "input", "id": "e1", "data": "", "eof": True},
    ]


async def test_errors_name_what_they_are_about() -> None:
    async def script(peer: Peer) -> None:
        await peer.error("not_found", stage="open", errno=2)

    async with ScriptedAgent(script) as agent:
        link = agent.link()
        with pytest.raises(NotFoundError) as raised:
            await link.stat("a/b")
        assert raised.value.details["path"] == "a/b"
        with pytest.raises(NotFoundError) as raised:
            await link.move("a", "b")
        assert (raised.value.details["path"], raised.value.details["target"]) == ("a", "b")
        with pytest.raises(NotFoundError) as raised:
            await link.kill(ExecId("e9"))
        assert raised.value.details["exec_id"] == "e9"


async def test_execs_and_usage_become_values() -> None:
    running = {
        "id": "e1",
        "pid": 9,
        "argv": ["sh", "-c", "x"],
        "tty": False,
        "running": True,
        "started_ms_ago": 12.5,
        "exit": None,
        "stdout_bytes": 1,
        "stderr_bytes": 2,
    }
    usage = {
        "cpu_ms": 1.5,
        "memory_bytes": 10,
        "memory_peak_bytes": None,
        "processes": 2,
        "io_read_bytes": None,
        "io_write_bytes": None,
        "disk_bytes": 4,
        "inodes": 5,
        "oom_kills": 0,
        "source": "cgroup1",
    }

    async def script(peer: Peer) -> None:
        ended = {**running, "running": False, "exit": EXITED}
        answers: dict[str, Any] = {"execs": {"execs": [running, ended]}, "usage": usage}
        await peer.reply(answers[peer.request["op"]])

    async with ScriptedAgent(script) as agent:
        first, second = await agent.link().execs()
        measured = await agent.link().usage()
        assert (await agent.link().ping())["id"] == "scripted"
    assert (first.argv, first.running, first.exit) == (("sh", "-c", "x"), True, None)
    assert second.exit is not None and second.exit.exit_code == 0
    assert (measured.cpu_ms, measured.memory_peak_bytes, measured.source) == (1.5, None, "cgroup1")


async def test_changes_arrive_until_one_leaves() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply({})
        await peer.event({"change": "create", "path": "n\udcffew", "dir": False})
        await peer.event({"change": "overflow", "path": "", "dir": True})
        await peer.gone()

    async with ScriptedAgent(script) as agent:
        async with agent.link().watch("d", recursive=True) as changes:
            assert await anext(changes) == Change("create", "n\udcffew", False)
            assert await anext(changes) == Change("overflow", "", True)
        await eventually(lambda: agent.open_connections == 0, what="the connection is closed")
    assert agent.requests == [{"op": "watch", "path": "d", "recursive": True}]


async def test_dialled_bytes_are_the_peers_from_the_first_on() -> None:
    async def script(peer: Peer) -> None:
        # In one write with the reply, and no frame at all: it must not be taken for one.
        await peer.raw(b"\0\0\0\x02\x03" + bytes(11) + b"{}" + b"\xff\xff\xff\xff hello")
        await peer.gone()

    async with ScriptedAgent(script) as agent:
        stream = await agent.link().dial(8000)
        assert await stream.receive(4) == b"\xff\xff\xff\xff"
        assert await stream.receive() == b" hello"
        await stream.aclose()
        await eventually(lambda: agent.open_connections == 0, what="the connection is closed")


async def test_nobody_listening_inside_is_unavailable() -> None:
    async def script(peer: Peer) -> None:
        await peer.error("refused", errno=111)

    async with ScriptedAgent(script) as agent:
        with pytest.raises(UnavailableError) as raised:
            await agent.link().dial(8000)
        assert raised.value.details["port"] == 8000
        await eventually(lambda: agent.open_connections == 0, what="the connection is closed")


async def test_connections_made_inside_are_taken_one_by_one() -> None:
    async def script(peer: Peer) -> None:
        if peer.request["op"] == "listen":
            await peer.reply({})
            for number in (1, 2, 3):
                await peer.event({"stream": number})
            await peer.gone()
        elif peer.request["stream"] == 2:
            await peer.error("gone")  # it did not wait for us
        else:
            await peer.reply({})
            await peer.raw(b"from %d" % peer.request["stream"])
            await peer.gone()

    async with ScriptedAgent(script) as agent:
        async with agent.link().listen(3128) as connections:
            for expected in (b"from 1", b"from 3"):
                stream = await anext(connections)
                assert await stream.receive() == expected
                await stream.aclose()
        await eventually(lambda: agent.open_connections == 0, what="all connections closed")
