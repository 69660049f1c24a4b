"""Execs over the link, with an agent that misbehaves in every way the real one should not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from capsule.errors import (
    CapsuleError,
    ConflictError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from capsule.link import exec_stream
from capsule.link.errors_map import AGENT_ERRORS
from capsule.link.exec_stream import Gap, Output
from capsule.link.protocol import FrameType, ProtocolError, load
from capsule.model import ExecId, ExecRequest, Reason, Stream
from capsule.testing.scripted import EXITED, Peer, ScriptedAgent
from tests.support import eventually


def request(**fields: Any) -> ExecRequest:
    return ExecRequest(("true",), ExecId("e1"), **fields)


BEGUN = {"id": "e1", "pid": 7}


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


async def test_collect_returns_what_was_printed() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.data(1, b"out")
        await peer.data(2, b"err")
        await peer.data(1, b"put", 3)
        await peer.data(5, b"A=1\0")
        await peer.exit(exit_code=3, stdout_bytes=6, stderr_bytes=3)

    async with ScriptedAgent(script) as agent:
        exit, stdout, stderr, carry = await agent.link().collect(request(carry=True))
    assert (stdout, stderr, carry) == (b"output", b"err", b"A=1\0")
    assert (exit.reason, exit.exit_code, exit.stdout_bytes) == (Reason.EXITED, 3, 6)


async def test_the_request_says_everything() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.exit()

    wanted = ExecRequest(
        ("a", "b c", "caf\udce9"),
        ExecId("e1"),
        env={"K": "v"},
        cwd="/x",
        timeout=2.5,
        stdin=True,
        tty=True,
        rows=1,
        cols=2,
        output_limit=3,
        keep="tail",
        on_limit="kill",
        carry=True,
    )
    async with ScriptedAgent(script) as agent:
        await agent.link().collect(wanted)
    assert agent.requests == [
        {
            "op": "exec",
            "id": "e1",
            "argv": ["a", "b c", "caf\udce9"],
            "env": {"K": "v"},
            "cwd": "/x",
            "timeout": 2.5,
            "stdin": True,
            "tty": True,
            "rows": 1,
            "cols": 2,
            "limit": 3,
            "keep": "tail",
            "on_limit": "kill",
            "carry": True,
        }
    ]


@pytest.mark.parametrize("size", [0, 10, 64 * 1024, 64 * 1024 + 1, 3_000_000])
@pytest.mark.parametrize("timeout", [0.0, 10.0])
async def test_collect_feeds_the_program_and_closes_its_input(size: int, timeout: float) -> None:
    received = bytearray()

    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        while (frame := await peer.frame()) is not None and frame.type is FrameType.DATA:
            assert frame.offset == len(received)
            received.extend(frame.payload)
        assert frame is not None and frame.type is FrameType.EOF and frame.offset == size
        await peer.exit()

    data = os.urandom(size)
    async with ScriptedAgent(script) as agent:
        await agent.link().collect(request(stdin=True, timeout=timeout), input=data)
    assert bytes(received) == data


@pytest.mark.parametrize("timeout", [0.0, 10.0])
async def test_a_program_that_ignores_its_input_is_no_failure(timeout: float) -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.exit(exit_code=1)

    async with ScriptedAgent(script) as agent:
        data = bytes(8_000_000)
        result = await agent.link().collect(request(stdin=True, timeout=timeout), input=data)
    assert result.exit.exit_code == 1


async def test_collect_without_timeout_gathers_the_same() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.data(3, b"on a terminal")
        await peer.data(5, b"carried")
        await peer.exit()

    async with ScriptedAgent(script) as agent:
        result = await agent.link().collect(request(timeout=0, tty=True))
    assert result[1:] == (b"on a terminal", b"", b"carried")


@pytest.mark.parametrize("timeout", [0.0, 5.0])
async def test_tail_keeps_the_last_bytes(timeout: float) -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        for number in range(100):
            await peer.data(1, b"%09d\n" % number, number * 10)
        await peer.event({"gap": 1, "from": 1000, "to": 2000})
        await peer.data(1, b"the end", 2000)
        await peer.exit()

    async with ScriptedAgent(script) as agent:
        tail = request(keep="tail", output_limit=27, timeout=timeout)
        assert (await agent.link().collect(tail)).stdout == b"000000098\n000000099\nthe end"


async def test_output_comes_with_its_offsets() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.data(1, b"one")
        await peer.event({"gap": 1, "from": 3, "to": 10})
        await peer.data(1, b"two", 10)
        await peer.send(FrameType.EOF, stream=1, offset=13)
        await peer.exit()

    async with ScriptedAgent(script) as agent, await agent.link().exec(request()) as stream:
        assert (stream.exec_id, stream.pid, stream.exit) == ("e1", 7, None)
        items = [item async for item in stream]
        assert items == [
            Output(Stream.STDOUT, 0, b"one"),
            Gap(Stream.STDOUT, 3, 10),
            Output(Stream.STDOUT, 10, b"two"),
        ]
        assert stream.offsets[Stream.STDOUT] == 13
        assert stream.exit is not None and stream.exit.exit_code == 0
        assert [item async for item in stream] == []


async def test_attach_goes_on_where_it_stopped() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.data(1, b"later", 100)
        await peer.data(2, b"too", 50)
        await peer.exit()

    async with ScriptedAgent(script) as agent:
        link = agent.link()
        async with await link.attach(ExecId("e1"), stdout=100, stderr=50) as stream:
            assert [item.data async for item in stream if isinstance(item, Output)] == [
                b"later",
                b"too",
            ]
    assert agent.requests[0] == {
        "op": "attach", "id": "e1", "stdout": 100, "stderr": 50, "input": False
    }  # fmt: skip


async def test_input_signals_and_sizes_reach_the_agent() -> None:
    typed = bytearray()
    controls = []

    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        while (frame := await peer.frame()) is not None and frame.type is not FrameType.EOF:
            if frame.type is FrameType.DATA:
                assert frame.stream == 0
                typed.extend(frame.payload)
            else:
                controls.append(load(frame.payload))
        await peer.exit()

    async with ScriptedAgent(script) as agent, await agent.link().exec(request()) as stream:
        await stream.send(b"a" * 300_000)
        await stream.signal("INT")
        await stream.signal("TERM", tree=True)
        await stream.resize(50, 132)
        await stream.send_eof()
        async for _ in stream:
            pass
        with pytest.raises(WrongStateError):
            await stream.send(b"too late")
    assert typed == b"a" * 300_000
    assert controls == [
        {"signal": "INT"},
        {"signal": "TERM", "tree": True},
        {"resize": [50, 132]},
    ]


async def test_a_terminal_gets_its_input_on_its_own_stream() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.data(3, b"$ ")
        frame = await peer.frame()
        assert frame is not None and (frame.stream, frame.payload) == (3, b"ls\n")
        await peer.exit()

    async with ScriptedAgent(script) as agent:
        async with await agent.link().attach(ExecId("e1"), input=True) as stream:
            assert await anext(stream) == Output(Stream.PTY, 0, b"$ ")
            await stream.send(b"ls\n")
            async for _ in stream:
                pass


@pytest.mark.parametrize("code", sorted(AGENT_ERRORS))
async def test_a_refused_exec_raises_what_the_code_means(code: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.error(code)

    async with ScriptedAgent(script) as agent:
        for attempt in (agent.link().collect, agent.link().exec):
            with pytest.raises(CapsuleError) as raised:
                await attempt(request())
            assert type(raised.value) is AGENT_ERRORS[code]


async def test_an_error_before_the_greeting_counts() -> None:
    async def script(peer: Peer) -> None:
        await peer.error("version")

    async with ScriptedAgent(script, greet=False) as agent:
        with pytest.raises(UnavailableError, match="scripted version"):
            await agent.link().collect(request())


async def test_a_missing_program_and_a_taken_id_are_told_apart() -> None:
    async def script(peer: Peer) -> None:
        if peer.request["id"] == "taken":
            await peer.error("conflict")
        else:
            await peer.error("not_found", stage="exec", errno=2)

    async with ScriptedAgent(script) as agent:
        with pytest.raises(NotFoundError, match="program not found: true"):
            await agent.link().collect(request())
        with pytest.raises(ConflictError):
            await agent.link().collect(ExecRequest(("true",), ExecId("taken")))


@pytest.mark.parametrize("frames", range(3))
async def test_a_cut_connection_is_unavailable_and_never_an_exit(frames: int) -> None:
    async def script(peer: Peer) -> None:
        if frames > 0:
            await peer.reply(BEGUN)
        if frames > 1:
            await peer.data(1, b"half")

    async with ScriptedAgent(script) as agent:
        with pytest.raises(UnavailableError, match="hung up"):
            await agent.link().collect(request())


async def test_a_stream_cut_mid_exec_raises_and_knows_how_far_it_came() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.data(1, b"half")

    async with ScriptedAgent(script) as agent, await agent.link().exec(request()) as stream:
        assert await anext(stream) == Output(Stream.STDOUT, 0, b"half")
        with pytest.raises(UnavailableError):
            await anext(stream)
        assert stream.exit is None
        assert stream.offsets[Stream.STDOUT] == 4


async def test_half_an_exit_is_no_exit() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.raw(
            b"\x00\x00\x00\xff\x08\0\0\0\0\0\0\0\0\0\0\0" + b'{"reason":"exited","exit_c'
        )

    async with ScriptedAgent(script) as agent:
        with pytest.raises(UnavailableError):
            await agent.link().collect(request())


WRONG_EXITS: list[dict[str, Any]] = [
    {},
    {**EXITED, "reason": "vanished"},
    {**EXITED, "reason": None},
    {**EXITED, "exit_code": "0"},
    {**EXITED, "exit_code": None},
    {**EXITED, "exit_code": True},
    {**EXITED, "exit_code": 0.0},
    {**EXITED, "duration_ms": "fast"},
    {**EXITED, "stdout_truncated": 0},
]


@pytest.mark.parametrize("body", WRONG_EXITS)
async def test_an_exit_that_makes_no_sense_is_not_believed(body: dict[str, Any]) -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.send(FrameType.EXIT, body)

    async with ScriptedAgent(script) as agent:
        with pytest.raises(ProtocolError):
            await agent.link().collect(request())
        async with await agent.link().exec(request()) as stream:
            with pytest.raises(ProtocolError):
                await anext(stream)
            assert stream.exit is None


async def after_reply(peer: Peer, type: FrameType, body: Any, **header: int) -> None:
    await peer.reply(BEGUN)
    await peer.send(type, body, **header)
    await peer.gone()


MISPLACED: list[tuple[FrameType, Any, dict[str, int]]] = [
    (FrameType.HELLO, {"version": 1}, {}),
    (FrameType.REPLY, BEGUN, {}),
    (FrameType.CONTROL, {}, {}),
    (FrameType.DATA, b"x", {"stream": 0}),
    (FrameType.DATA, b"x", {"stream": 4}),
    (FrameType.DATA, b"x", {"stream": 77}),
    (FrameType.DATA, b"x" * 200, {"stream": 1}),
    (FrameType.EXIT, b"not json", {}),
]


@pytest.mark.parametrize(("type", "body", "header"), MISPLACED)
async def test_frames_that_do_not_belong_are_a_protocol_error(
    type: FrameType, body: Any, header: dict[str, int]
) -> None:
    async with ScriptedAgent(lambda peer: after_reply(peer, type, body, **header)) as agent:
        with pytest.raises(ProtocolError):
            await agent.link().collect(request(output_limit=100))


@pytest.mark.parametrize(
    ("type", "body", "header"),
    [
        (FrameType.DATA, b"x", {"stream": 1, "offset": 5}),
        (FrameType.EVENT, {"gap": 1, "from": 5, "to": 9}, {}),
        (FrameType.EVENT, {"gap": 9, "from": 0, "to": 9}, {}),
        (FrameType.EVENT, {"gap": 1, "from": 0, "to": -9}, {}),
        (FrameType.EVENT, {"gap": "1", "from": 0, "to": 9}, {}),
        (FrameType.DATA, b"x" * 262_145, {"stream": 5}),
    ],
)
async def test_bytes_missing_without_a_word_are_a_protocol_error(
    type: FrameType, body: Any, header: dict[str, int]
) -> None:
    async with ScriptedAgent(lambda peer: after_reply(peer, type, body, **header)) as agent:
        async with await agent.link().exec(request()) as stream:
            with pytest.raises(ProtocolError):
                await anext(stream)


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 200 OK\r\n\r\n", b"\0" * 64, b"\xff" * 64, b'{"version": 1}\n' * 4]
)
async def test_something_that_is_no_agent_is_a_protocol_error(garbage: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.raw(garbage)
        await peer.gone()

    async with ScriptedAgent(script, greet=False) as agent:
        with pytest.raises(ProtocolError):
            await agent.link().collect(request())


async def test_another_version_is_a_protocol_error() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(FrameType.HELLO, {"version": 2})
        await peer.reply(BEGUN)
        await peer.exit()

    async with ScriptedAgent(script, greet=False) as agent:
        with pytest.raises(ProtocolError, match="another protocol"):
            await agent.link().collect(request())


async def test_frames_after_the_exit_are_ignored() -> None:
    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.exit(exit_code=4)
        await peer.data(1, b"late")
        await peer.exit(exit_code=5)
        await peer.raw(b"\xff" * 100)

    async with ScriptedAgent(script) as agent:
        assert (await agent.link().collect(request())).exit.exit_code == 4
        async with await agent.link().exec(request()) as stream:
            assert [item async for item in stream] == []
            assert stream.exit is not None and stream.exit.exit_code == 4


async def mute(peer: Peer) -> None:
    await peer.gone()


async def test_an_agent_that_never_answers_is_given_up() -> None:
    async with ScriptedAgent(mute, greet=False, answer_ping=False) as agent:
        link = agent.link(timeout=0.05)
        for attempt in (link.collect(request()), link.exec(request()), link.execs(), link.ping()):
            with pytest.raises(UnavailableError, match="did not answer"):
                await attempt
        await eventually(lambda: agent.open_connections == 0, what="all connections closed")


async def test_a_deadline_bounds_the_start() -> None:
    async with ScriptedAgent(mute) as agent:
        soon = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(UnavailableError, match="did not answer"):
            await agent.link().exec(request(), deadline=soon)


async def begun_then_mute(peer: Peer) -> None:
    await peer.reply(BEGUN)
    await peer.gone()


@pytest.mark.usefixtures("impatient")
async def test_an_exec_that_outlives_its_timeout_is_given_up() -> None:
    async with ScriptedAgent(begun_then_mute) as agent:
        with pytest.raises(UnavailableError, match="did not answer"):
            await agent.link().collect(request(timeout=0.01))
        async with await agent.link().exec(request(timeout=0.01)) as stream:
            with pytest.raises(UnavailableError, match="did not end exec e1 at its timeout"):
                await anext(stream)
        await eventually(lambda: agent.open_connections == 0, what="all connections closed")


@pytest.mark.usefixtures("impatient")
async def test_silence_is_patience_while_the_agent_lives() -> None:
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


@pytest.mark.usefixtures("impatient")
async def test_input_nobody_reads_waits_as_long_as_the_agent_lives() -> None:
    read_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await read_on.wait()
        await peer.gone()

    async with ScriptedAgent(script) as agent, await agent.link().exec(request(timeout=0)) as exe:
        sending = asyncio.create_task(exe.send(bytes(8_000_000)))
        await eventually(lambda: len(agent.requests) > 2, what="the agent is asked twice")
        assert not sending.done()
        read_on.set()
        await sending


async def begun_then_deaf(peer: Peer) -> None:
    await peer.reply(BEGUN)
    await asyncio.Event().wait()  # reads nothing


async def test_cancelled_input_leaves_no_task_behind() -> None:
    async with ScriptedAgent(begun_then_deaf) as agent:
        exe = await agent.link().exec(request(timeout=0))
        before = asyncio.all_tasks()
        sending = asyncio.create_task(exe.send(bytes(8_000_000)))
        await eventually(lambda: asyncio.all_tasks() - before - {sending}, what="it waits")
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert asyncio.all_tasks() <= before
        await exe.aclose()


@pytest.mark.parametrize("step", range(1, 12))
async def test_cancelled_anywhere_nothing_is_left(step: int) -> None:
    """The exec is cancelled after each turn of the loop in which it has done something."""

    async def script(peer: Peer) -> None:
        await peer.reply(BEGUN)
        await peer.data(1, b"x")
        await peer.gone()

    async with ScriptedAgent(script) as agent:
        task = asyncio.create_task(agent.link().collect(request(stdin=True), input=bytes(900_000)))
        for _ in range(step):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: agent.open_connections == 0, what="the connection is closed")
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_leaving_the_stream_hangs_up_and_nothing_more() -> None:
    async with ScriptedAgent(begun_then_mute) as agent:
        async with await agent.link().exec(request()) as stream:
            assert agent.open_connections == 1
        await stream.aclose()
        await eventually(lambda: agent.open_connections == 0, what="the connection is closed")
        assert [r["op"] for r in agent.requests] == ["exec"]


async def test_nobody_home_is_unavailable() -> None:
    agent = ScriptedAgent(mute)
    async with agent:
        pass
    with pytest.raises(UnavailableError, match="not there"):
        await agent.link().collect(request())
