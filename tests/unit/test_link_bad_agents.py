"""The link, with an agent that does what the real one never does.

What the link does with the real agent is in the contract suite.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from capsule.errors import CapsuleError, NoSpaceError, UnavailableError
from capsule.link import exec_stream
from capsule.link.link import AgentLink
from capsule.link.protocol import FrameType, ProtocolError
from capsule.model import ExecId, ExecRequest
from capsule.testing.scripted import EXITED, Peer, Script, ScriptedAgent
from tests.support import eventually

BEGUN = {"id": "e1", "pid": 7}
STAT = {
    "name": "a", "path": "a", "type": "file", "size": 3, "mode": 0o644, "mtime": 1.5,
    "uid": 1000, "gid": 1000, "target": None,
}  # fmt: skip


def request(**fields: Any) -> ExecRequest:
    return ExecRequest(("true",), ExecId("e1"), **fields)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed at once, and overtime is short."""
    monkeypatch.setattr(exec_stream, "_QUIET", 0.02)
    monkeypatch.setattr(exec_stream, "OVERTIME", 0.05)
    monkeypatch.setattr("capsule.link.collect.OVERTIME", 0.05)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the listing's own


def says(*frames: tuple[FrameType, Any, dict[str, int]], stay: bool = False) -> Script:
    """Begins the exec, sends these frames, and hangs up or stays."""

    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        for type, body, header in frames:
            await peer.send(type, body, **header)
        if stay:
            await peer.gone()

    return script


async def mute(peer: Peer) -> None:
    await peer.gone()


async def all_closed(agent: ScriptedAgent) -> None:
    await eventually(lambda: agent.open_connections == 0, what="all connections are closed")


# Answers that are wrong


HALF_AN_EXIT = b"\x00\x00\x00\xff\x08\0\0\0\0\0\0\0\0\0\0\0" + b'{"reason":"exited","exit_c'


@pytest.mark.parametrize("sent", [None, b"", b"half", HALF_AN_EXIT])
async def test_a_cut_connection_is_unavailable_and_never_an_exit(sent: bytes | None) -> None:
    async def script(peer: Peer) -> None:
        if sent is not None:
            await peer.reply(BEGUN)
            await (peer.raw(sent) if sent == HALF_AN_EXIT else peer.data(1, sent or b"x"))

    async with ScriptedAgent(script) as agent:
        with pytest.raises(UnavailableError):
            await agent.link().collect(request())
        with pytest.raises(UnavailableError):
            async with await agent.link().exec(request()) as stream:
                assert [item async for item in stream] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": "vanished"},
        {"reason": None},
        {"exit_code": "0"},
        {"exit_code": None},
        {"exit_code": True},
        {"exit_code": 0.0},
        {"duration_ms": "fast"},
        {"stdout_truncated": 0},
    ],
)
async def test_an_exit_that_makes_no_sense_is_not_believed(wrong: dict[str, Any]) -> None:
    async with ScriptedAgent(says((FrameType.EXIT, {**EXITED, **wrong}, {}))) as agent:
        with pytest.raises(ProtocolError):
            await agent.link().collect(request())
        async with await agent.link().exec(request()) as stream:
            with pytest.raises(ProtocolError):
                await anext(stream)
            assert stream.exit is None


@pytest.mark.parametrize(
    ("type", "body", "header"),
    [
        (FrameType.HELLO, {"version": 1}, {}),
        (FrameType.REPLY, BEGUN, {}),
        (FrameType.CONTROL, {}, {}),
        (FrameType.DATA, b"x", {"stream": 0}),
        (FrameType.DATA, b"x", {"stream": 4}),
        (FrameType.DATA, b"x", {"stream": 77}),
        (FrameType.DATA, b"x" * 262_145, {"stream": 5}),
        (FrameType.DATA, b"x", {"stream": 1, "offset": 5}),
        (FrameType.EVENT, {"gap": 1, "from": 5, "to": 9}, {}),
        (FrameType.EVENT, {"gap": 9, "from": 0, "to": 9}, {}),
        (FrameType.EVENT, {"gap": 1, "from": 0, "to": -9}, {}),
        (FrameType.EVENT, {"gap": "1", "from": 0, "to": 9}, {}),
        (FrameType.EXIT, b"not json", {}),
        (FrameType.EXIT, {}, {}),
    ],
)
async def test_a_frame_that_does_not_belong_is_a_protocol_error(
    type: FrameType, body: Any, header: dict[str, int]
) -> None:
    async with ScriptedAgent(says((type, body, header), stay=True)) as agent:
        async with await agent.link().exec(request()) as stream:
            with pytest.raises(ProtocolError):
                await anext(stream)


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\0" * 64,
        b"\xff" * 64,
        b"\0\0\0\x0d\x01" + bytes(11) + b'{"version":2}',
    ],
)
async def test_something_that_is_no_agent_is_a_protocol_error(garbage: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.raw(garbage)
        await peer.gone()

    async with ScriptedAgent(script, greet=False) as agent:
        with pytest.raises(ProtocolError):
            await agent.link().collect(request())


# Silence


async def test_an_agent_that_never_answers_is_given_up() -> None:
    async with ScriptedAgent(mute, greet=False, answer_ping=False) as agent:
        link = agent.link(timeout=0.05)
        for attempt in (link.collect(request()), link.exec(request()), link.execs(), link.ping()):
            with pytest.raises(UnavailableError, match="did not answer"):
                await attempt
        await all_closed(agent)


@pytest.mark.usefixtures("impatient")
async def test_an_exec_that_outlives_its_timeout_is_given_up() -> None:
    async with ScriptedAgent(says(stay=True)) as agent:
        with pytest.raises(UnavailableError, match="did not answer"):
            await agent.link().collect(request(timeout=0.01))
        async with await agent.link().exec(request(timeout=0.01)) as stream:
            with pytest.raises(UnavailableError, match="did not end exec e1 at its timeout"):
                await anext(stream)
        await all_closed(agent)


@pytest.mark.usefixtures("impatient")
async def test_a_silent_program_is_waited_for_while_the_agent_answers() -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await go_on.wait()
        await peer.data(1, b"at last")
        await peer.exit()

    async with ScriptedAgent(script) as agent:
        collecting = asyncio.create_task(agent.link().collect(request(timeout=0)))
        await eventually(lambda: len(agent.requests) > 2, what="the agent is asked twice")
        assert [r["op"] for r in agent.requests[:3]] == ["exec", "ping", "ping"]
        go_on.set()
        assert (await collecting).stdout == b"at last"


@pytest.mark.usefixtures("impatient")
async def test_silence_of_a_stuck_agent_is_noticed() -> None:
    async def script(peer: Peer) -> None:
        if peer.request["op"] != "ping":
            await peer.reply(BEGUN)
        await peer.gone()

    async with ScriptedAgent(script, answer_ping=False) as agent:
        with pytest.raises(UnavailableError, match="did not answer: ping"):
            await agent.link(timeout=0.05).collect(request(timeout=0))


# Leaving


@pytest.mark.parametrize("turns", range(1, 12))
async def test_an_exec_cancelled_anywhere_leaves_nothing(turns: int) -> None:
    script = says((FrameType.DATA, b"x", {"stream": 1}), stay=True)
    async with ScriptedAgent(script) as agent:
        task = asyncio.create_task(agent.link().collect(request(stdin=True), input=bytes(900_000)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await all_closed(agent)
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def leave_an_exec(link: AgentLink) -> None:
    async with await link.exec(request()) as stream:
        assert stream.pid == 7
    await stream.aclose()


async def leave_a_file(link: AgentLink) -> None:
    async with link.read("a") as reader:
        await anext(reader)


async def leave_a_watch(link: AgentLink) -> None:
    async with link.watch(".") as changes:
        assert (await anext(changes)).path == "n\udcffew"


@pytest.mark.parametrize("leave", [leave_an_exec, leave_a_file, leave_a_watch])
async def test_leaving_hangs_up_and_sends_nothing_more(
    leave: Callable[[AgentLink], Awaitable[None]],
) -> None:
    async def script(peer: Peer) -> None:
        if peer.request["op"] == "read":
            await peer.event({"size": 1 << 30, "mode": 0o100644, "mtime": 12.5})
            while True:
                await peer.data(4, bytes(65536))
        await peer.reply(BEGUN)
        if peer.request["op"] == "watch":
            await peer.event({"change": "create", "path": "n\udcffew", "dir": False})
        await peer.gone()

    async with ScriptedAgent(script) as agent:
        await leave(agent.link())
        await all_closed(agent)
        assert len(agent.requests) == 1


# Files


async def begin_file(peer: Peer) -> None:
    await peer.event({"size": 6, "mode": 0o100644, "mtime": 12.5})
    await peer.data(4, b"abc")


async def read_all(link: AgentLink) -> bytes:
    async with link.read("a") as reader:
        return b"".join([chunk async for chunk in reader])


async def test_a_file_that_does_not_come_whole_is_an_error() -> None:
    async def lie(peer: Peer) -> None:
        await begin_file(peer)
        await peer.reply({"bytes": 6})

    async def fail(peer: Peer) -> None:
        await begin_file(peer)
        await peer.error("internal", stage="read", errno=5)

    async def stop(peer: Peer) -> None:
        await begin_file(peer)
        await peer.gone()

    for script in (begin_file, lie, fail, stop):
        async with ScriptedAgent(script) as agent:
            with pytest.raises(CapsuleError):
                await read_all(agent.link(idle=0.05))


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_refusal_in_the_middle_of_a_write_says_why() -> None:
    async def script(peer: Peer) -> None:
        for _ in range(3):
            await peer.frame()
        await peer.error("no_space")  # and hangs up, with most of the data unread

    async with ScriptedAgent(script) as agent:
        for data in (bytes(5_000_000), pieces(*[bytes(300_000)] * 20)):
            with pytest.raises(NoSpaceError, match="scripted no_space"):
                await agent.link().write("a", data)


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
        await all_closed(agent)
    assert seen == [FrameType.DATA]


@pytest.mark.parametrize(
    "entries",
    [[STAT] * 4, [None], [[]], [{}], [{**STAT, "size": "3"}], [{**STAT, "mtime": True}]],
    ids=["too many", "null", "list", "empty", "size", "mtime"],
)
async def test_a_listing_that_makes_no_sense_is_refused(entries: list[Any]) -> None:
    async def script(peer: Peer) -> None:
        await peer.event({"entries": entries})
        await peer.reply({"truncated": False})

    async with ScriptedAgent(script) as agent:
        with pytest.raises(ProtocolError):
            await agent.link().list(".", limit=3)


# Connections


async def test_bytes_right_behind_the_reply_are_the_dialled_programs() -> None:
    async def script(peer: Peer) -> None:
        await peer.raw(b"\0\0\0\x02\x03" + bytes(11) + b"{}" + b"\xff\xff\xff\xff hello")
        await peer.gone()

    async with ScriptedAgent(script) as agent:
        stream = await agent.link().dial(8000)
        assert await stream.receive(4) == b"\xff\xff\xff\xff"
        assert await stream.receive() == b" hello"
        await stream.aclose()
