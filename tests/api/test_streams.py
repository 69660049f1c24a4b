"""Execs as events and over WebSocket: nothing lost, nothing repeated, no character split."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.api.client import Api, SseEvent, events
from tests.support import eventually
from tests.support.servers import RealServer

pytestmark = pytest.mark.real

# 60,000 bytes on both streams, in odd pieces, with characters of two, three and four bytes.
TALK = r"""
i=0
while [ $i -lt 600 ]; do
  printf 'äöü€€😀 line %05d and some more text to fill it up é\n' $i
  printf 'err😀%05d' $i >&2
  i=$((i + 1))
done
"""


async def started(api: Api, box: str, cmd: Any, **more: Any) -> str:
    return str((await api.rpc("start", id=box, cmd=cmd, **more))["exec_id"])


async def runs(api: Api, box: str, exec_id: str) -> bool:
    info = await api.http.get(f"/v1/sandboxes/{box}/execs/{exec_id}")
    return info.json()["running"] is True


async def read_some(
    api: Api, url: str, last: str | None, stop_after: int, **query: str
) -> AsyncIterator[SseEvent]:
    """Follow from `last` on and hang up after some events, in the middle of everything."""
    headers = {"Last-Event-ID": last} if last else {}
    async with api.http.stream("GET", url, headers=headers, params=query) as answer:
        assert answer.status_code == 200
        seen = 0
        async for event in events(answer):
            yield event
            seen += 1
            if seen >= stop_after:
                return


@pytest.mark.parametrize("encoding", ["text", "base64"])
async def test_resuming_loses_and_repeats_nothing(api: Api, box: str, encoding: str) -> None:
    """Over many short connections, and without splitting a character."""
    expected = await api.rpc("exec", id=box, cmd=["sh", "-c", TALK])
    exec_id = await started(api, box, ["sh", "-c", TALK])
    url = f"/v1/sandboxes/{box}/execs/{exec_id}/stream"
    whole = {"stdout": b"", "stderr": b""}
    decode = str.encode if encoding == "text" else base64.b64decode
    last, connections, end = None, 0, None
    while end is None:
        connections += 1
        async for event in read_some(api, url, last, connections % 3 + 1, encoding=encoding):
            last = event.id
            if event.name == "exit":
                end = event.data
            else:
                whole[event.name] += decode(event.data["data"])
    assert whole == {name: expected[name].encode() for name in whole}
    assert (end["exit_code"], connections > 1) == (0, True)
    over = await api.http.get(url, headers={"Last-Event-ID": str(last)})
    assert over.status_code == 204


async def test_post_answers_with_events_when_asked_to(api: Api, box: str) -> None:
    url = f"/v1/sandboxes/{box}/execs"
    for options in ({"params": {"stream": "sse"}}, {"headers": {"Accept": "text/event-stream"}}):
        body = {"cmd": "echo out; sleep 0.1; echo err >&2; exit 7"}
        async with api.http.stream("POST", url, json=body, **options) as answer:  # type: ignore[arg-type]
            seen = [event async for event in events(answer)]
        assert [e.name for e in seen] == ["started", "stdout", "stderr", "exit"]
        assert seen[0].data["exec_id"] == seen[-1].data["exec_id"]
        assert seen[1].data == {"offset": 0, "data": "out\n"}
        assert seen[-1].data["exit_code"] == 7


async def test_a_wrong_place_to_go_on_from_is_refused(api: Api, box: str) -> None:
    result = await api.rpc("exec", id=box, cmd="echo four")
    url = f"/v1/sandboxes/{box}/execs/{result['exec_id']}/stream"
    for last in ("x", "1", "-1-0", "1-2-3", "9" * 30 + "-0"):
        assert (await api.http.get(url, headers={"Last-Event-ID": last})).status_code == 400
    for offset in ("6", "-1"):
        assert (await api.http.get(url, params={"stdout": offset})).status_code == 400


def socket_to(api: Api, box: str) -> Any:
    url = f"ws://{api.http.base_url.host}:{api.http.base_url.port}/v1/sandboxes/{box}/exec/ws"
    # A client that closes with unread messages waits this long for the answer to its close.
    return connect(url, proxy=None, close_timeout=1)


async def until_closed(socket: ClientConnection) -> tuple[list[Any], int, str]:
    """The messages, and the close's code and reason."""
    messages: list[Any] = []
    try:
        while True:
            message = await socket.recv()
            messages.append(json.loads(message) if isinstance(message, str) else message)
    except ConnectionClosed as closed:
        assert closed.rcvd is not None
        return messages, closed.rcvd.code, closed.rcvd.reason


async def begin(socket: ClientConnection, cmd: Any, **more: Any) -> str:
    await socket.send(json.dumps({"type": "start", "cmd": cmd, **more}))
    return str(json.loads(await socket.recv())["exec_id"])


async def test_exec_over_websocket_with_input(api: Api, box: str) -> None:
    async with socket_to(api, box) as socket:
        await begin(socket, "cat; echo bye >&2")
        await socket.send(b"bytes \xe2\x82\xac\n")
        await socket.send(json.dumps({"type": "input", "data": "text\n"}))
        await socket.send(json.dumps({"type": "eof"}))
        messages, code, reason = await until_closed(socket)
    assert "".join(m["data"] for m in messages if m["type"] == "stdout") == "bytes €\ntext\n"
    assert [m["data"] for m in messages if m["type"] == "stderr"] == ["bye\n"]
    assert (messages[-1]["type"], messages[-1]["exit_code"]) == ("exit", 0)
    assert (code, reason) == (1000, "the program exited")


async def test_binary_frames_carry_offsets_and_a_socket_can_come_back(api: Api, box: str) -> None:
    expected = await api.rpc("exec", id=box, cmd=["sh", "-c", TALK], encoding="base64")
    data = {1: b"", 2: b""}

    async def take(socket: ClientConnection, most: int) -> bool:
        for _ in range(most):
            message = await socket.recv()
            if isinstance(message, str):
                if json.loads(message)["type"] == "exit":
                    return True
                continue
            number, offset = struct.unpack(">BQ", message[:9])
            assert offset == len(data[number])
            data[number] += message[9:]
        return False

    async with socket_to(api, box) as socket:
        exec_id = await begin(socket, ["sh", "-c", TALK], frames="binary")
        over = await take(socket, 3)
    while not over:
        async with socket_to(api, box) as socket:
            attach = {"type": "attach", "exec_id": exec_id, "frames": "binary"}
            offsets = {"stdout": len(data[1]), "stderr": len(data[2])}
            await socket.send(json.dumps(attach | offsets))
            over = await take(socket, 5)
    assert data[1] == base64.b64decode(expected["stdout"])
    assert data[2] == base64.b64decode(expected["stderr"])


async def test_signals_and_terminals_over_websocket(api: Api, box: str) -> None:
    async with socket_to(api, box) as socket:
        script = "trap 'stty size; exit 9' INT; echo ready; while :; do sleep 0.05; done"
        await begin(socket, ["sh", "-c", script], tty={"rows": 30, "cols": 90})
        seen = ""
        while "ready" not in seen:
            seen += json.loads(await socket.recv()).get("data", "")
        await socket.send(json.dumps({"type": "resize", "rows": 50, "cols": 132}))
        await socket.send(json.dumps({"type": "signal", "signal": "INT"}))
        messages, _, _ = await until_closed(socket)
    assert "50 132" in "".join(m["data"] for m in messages if m["type"] == "pty")
    assert messages[-1]["exit_code"] == 9


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("no json", "invalid"),
        (b"\x00", "invalid"),
        ('{"type":"dance"}', "invalid"),
        ('{"type":"start","cmd":5}', "invalid"),
        ('{"type":"start","cmd":["true"],"timeout_ms":1000000000}', "invalid"),
        ('{"type":"attach","exec_id":"no id at all"}', "invalid"),
        ('{"type":"attach","exec_id":"e-unknown"}', "not_found"),
        ('{"type":"start","cmd":["no-such-program"]}', "not_found"),
    ],
)
async def test_a_first_message_that_starts_nothing_closes(
    api: Api, box: str, first: str | bytes, code: str
) -> None:
    async with socket_to(api, box) as socket:
        await socket.send(first)
        messages, closed, reason = await until_closed(socket)
    assert [(m["type"], m["code"]) for m in messages] == [("error", code)]
    assert (closed, reason.startswith(f"{code}: ")) == (1008, True)


@pytest.mark.parametrize(
    ("later", "close"),
    [
        ("{", 1008),
        ('{"type":"sing"}', 1008),
        ('{"type":"signal","signal":"LOUD"}', 1008),
        (b"x" * (1024 * 1024 + 1), 1009),
    ],
)
async def test_a_wrong_later_message_closes_and_the_exec_goes_on(
    api: Api, box: str, later: str | bytes, close: int
) -> None:
    async with socket_to(api, box) as socket:
        exec_id = await begin(socket, ["sleep", "60"])
        await socket.send(later)
        messages, code, _ = await until_closed(socket)
    assert code == close
    assert [m["code"] for m in messages] == (["invalid"] if close == 1008 else [])
    assert await runs(api, box, exec_id)


async def test_an_attachment_without_input_may_send_nothing(api: Api, box: str) -> None:
    exec_id = await started(api, box, ["sleep", "60"])
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps({"type": "attach", "exec_id": exec_id, "input": False}))
        await socket.recv()
        await socket.send(b"x")
        messages, code, _ = await until_closed(socket)
    assert (code, "without input" in messages[0]["message"]) == (1008, True)
    assert await runs(api, box, exec_id)


async def test_the_end_of_the_sandbox_is_a_normal_close(api: Api) -> None:
    box = (await api.rpc("create", template="bash"))["id"]
    async with socket_to(api, box) as socket:
        await begin(socket, ["sleep", "60"])
        await api.rpc("delete", id=box)
        messages, code, _ = await until_closed(socket)
    assert [(m["type"], m["code"]) for m in messages] == [("error", "gone")]
    assert code == 1001
    with pytest.raises(InvalidStatus) as refused:
        async with socket_to(api, "nosuchbox"):
            pass
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "not_found"


async def test_a_client_that_vanishes_leaves_no_file_open_and_ends_nothing(
    server: RealServer, api: Api, box: str
) -> None:
    """Also while the program does not take its input."""
    await api.rpc("exec", id=box, cmd=["true"])
    before = open_files(server)
    async with socket_to(api, box) as socket:
        exec_id = await begin(socket, ["sleep", "100"])
        # More than pipes and buffers on the way hold, and less than the server reads ahead: beyond
        # that it does not notice that a client leaves (edge/sockets.py, Inbox).
        for _ in range(6):
            await socket.send(b"x" * 200_000)
        assert open_files(server) > before
        socket.transport.abort()
    await eventually(lambda: open_files(server) <= before, what="the server let go of it")
    assert await runs(api, box, exec_id)


@pytest.mark.parametrize("what", ["execs/{exec_id}/stream", "files/workspace/large", "watch"])
async def test_a_reader_that_vanishes_leaves_no_file_open(
    server: RealServer, api: Api, box: str, what: str
) -> None:
    await api.sh(box, "truncate -s 300M large")
    exec_id = await started(api, box, ["sleep", "100"])
    before = open_files(server)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    path = f"/v1/sandboxes/{box}/{what.format(exec_id=exec_id)}"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b" 200 " in await reader.readline()
    assert open_files(server) > before
    writer.transport.abort()
    await eventually(lambda: open_files(server) <= before, what="the server let go of it")


def open_files(server: RealServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
