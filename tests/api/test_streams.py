"""Execs as events and over WebSocket: nothing lost, nothing repeated, no character split."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
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


async def pieced_together(api: Api, url: str, **query: str) -> dict[str, Any]:
    """All of an exec's output over many short connections."""
    whole: dict[str, Any] = {"stdout": [], "stderr": [], "connections": 0}
    last: str | None = None
    while "exit" not in whole:
        whole["connections"] += 1
        async for event in read_some(
            api, url, last, stop_after=whole["connections"] % 3 + 1, **query
        ):
            last = event.id
            if event.name == "exit":
                whole["exit"] = event.data
            else:
                whole[event.name].append(event.data)
    return whole


async def test_resuming_loses_and_repeats_no_byte(api: Api, box: str) -> None:
    expected = await api.rpc("exec", id=box, cmd=["sh", "-c", TALK], encoding="base64")
    exec_id = await started(api, box, ["sh", "-c", TALK])
    url = f"/v1/sandboxes/{box}/execs/{exec_id}/stream"
    whole = await pieced_together(api, url, encoding="base64")
    for name in ("stdout", "stderr"):
        data = b"".join(base64.b64decode(part["data"]) for part in whole[name])
        assert data == base64.b64decode(expected[name])
    assert whole["connections"] > 1
    assert whole["exit"]["exit_code"] == 0


async def test_resuming_in_text_splits_no_character(api: Api, box: str) -> None:
    expected = await api.rpc("exec", id=box, cmd=["sh", "-c", TALK])
    exec_id = await started(api, box, ["sh", "-c", TALK])
    whole = await pieced_together(api, f"/v1/sandboxes/{box}/execs/{exec_id}/stream")
    for name in ("stdout", "stderr"):
        assert "".join(part["data"] for part in whole[name]) == expected[name]
        assert "�" not in expected[name]


@pytest.mark.parametrize("encoding", ["text", "base64"])
async def test_no_event_is_large_and_between_any_two_one_can_go_on(
    api: Api, box: str, encoding: str
) -> None:
    flood = ["sh", "-c", "yes 'ein größeres Stück € 😀' | head -n 45000"]
    result = await api.rpc("exec", id=box, cmd=flood)
    url = f"/v1/sandboxes/{box}/execs/{result['exec_id']}/stream"
    whole = await pieced_together(api, url, encoding=encoding)
    decode = str.encode if encoding == "text" else base64.b64decode
    parts = [decode(part["data"]) for part in whole["stdout"]]
    assert b"".join(parts) == result["stdout"].encode()
    assert len(b"".join(parts)) > 1024 * 1024
    assert max(map(len, parts)) <= 64 * 1024


async def test_characters_written_byte_by_byte_arrive_whole(api: Api, box: str) -> None:
    script = r"for b in 342 202 254; do printf \\$b; sleep 0.1; done; printf '\360\237'"
    exec_id = await started(api, box, ["sh", "-c", script])
    url = f"/v1/sandboxes/{box}/execs/{exec_id}/stream"
    async with api.http.stream("GET", url) as answer:
        seen = [event async for event in events(answer)]
    assert [e.data["data"] for e in seen[:-1]] == ["€", "�"]
    assert [e.id for e in seen] == ["3-0", "5-0", "5-0-end"]


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


async def test_output_comes_while_the_program_runs(api: Api, box: str) -> None:
    exec_id = await started(api, box, "echo first; sleep 60")
    async for event in read_some(
        api, f"/v1/sandboxes/{box}/execs/{exec_id}/stream", None, stop_after=1
    ):
        assert event.data["data"] == "first\n"
    info = await api.http.get(f"/v1/sandboxes/{box}/execs/{exec_id}")
    assert info.json()["running"] is True


async def test_coming_back_after_the_end(api: Api, box: str) -> None:
    result = await api.rpc("exec", id=box, cmd="echo done")
    url = f"/v1/sandboxes/{box}/execs/{result['exec_id']}/stream"
    again = [event async for event in read_some(api, url, None, stop_after=9)]
    assert [e.name for e in again] == ["stdout", "exit"]
    over = await api.http.get(url, headers={"Last-Event-ID": again[-1].id})
    assert over.status_code == 204


@pytest.mark.parametrize("last", ["x", "1", "-1-0", "1-2-3", "9" * 30 + "-0", "1-2-end\x01"])
async def test_an_event_id_that_is_none_of_ours(api: Api, box: str, last: str) -> None:
    result = await api.rpc("exec", id=box, cmd="true")
    url = f"/v1/sandboxes/{box}/execs/{result['exec_id']}/stream"
    try:
        answer = await api.http.get(url, headers={"Last-Event-ID": last})
    except httpx.LocalProtocolError:
        return
    assert answer.status_code == 400


async def test_an_offset_beyond_the_output_is_refused(api: Api, box: str) -> None:
    result = await api.rpc("exec", id=box, cmd="echo four")
    url = f"/v1/sandboxes/{box}/execs/{result['exec_id']}/stream"
    assert (await api.http.get(url, params={"stdout": "6"})).status_code == 400
    assert (await api.http.get(url, params={"stdout": "-1"})).status_code == 400


def socket_to(api: Api, box: str) -> Any:
    url = f"ws://{api.http.base_url.host}:{api.http.base_url.port}/v1/sandboxes/{box}/exec/ws"
    return connect(url, proxy=None)


async def until_closed(socket: ClientConnection) -> tuple[list[Any], ConnectionClosed]:
    messages: list[Any] = []
    try:
        while True:
            message = await socket.recv()
            messages.append(json.loads(message) if isinstance(message, str) else message)
    except ConnectionClosed as closed:
        return messages, closed


async def test_exec_over_websocket_with_input(api: Api, box: str) -> None:
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps({"type": "start", "cmd": "cat; echo bye >&2"}))
        await socket.send(b"bytes \xe2\x82\xac\n")
        await socket.send(json.dumps({"type": "input", "data": "text\n"}))
        await socket.send(json.dumps({"type": "eof"}))
        messages, closed = await until_closed(socket)
    assert messages[0]["type"] == "started"
    text = "".join(m["data"] for m in messages if m["type"] == "stdout")
    assert text == "bytes €\ntext\n"
    assert [m["data"] for m in messages if m["type"] == "stderr"] == ["bye\n"]
    assert messages[-1]["type"] == "exit"
    assert messages[-1]["exit_code"] == 0
    assert closed.rcvd is not None
    assert (closed.rcvd.code, closed.rcvd.reason) == (1000, "the program exited")


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
        start = {"type": "start", "cmd": ["sh", "-c", TALK], "frames": "binary"}
        await socket.send(json.dumps(start))
        exec_id = json.loads(await socket.recv())["exec_id"]
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
        start = {"type": "start", "cmd": ["sh", "-c", script], "tty": {"rows": 30, "cols": 90}}
        await socket.send(json.dumps(start))
        said = ""
        while "ready" not in said:
            message = json.loads(await socket.recv())
            said += message.get("data", "")
        await socket.send(json.dumps({"type": "resize", "rows": 50, "cols": 132}))
        await socket.send(json.dumps({"type": "signal", "signal": "INT"}))
        messages, _ = await until_closed(socket)
    assert "50 132" in "".join(m["data"] for m in messages if m["type"] == "pty")
    assert messages[-1]["exit_code"] == 9


async def test_a_socket_that_goes_ends_nothing(api: Api, box: str) -> None:
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps({"type": "start", "cmd": ["sleep", "60"]}))
        exec_id = json.loads(await socket.recv())["exec_id"]
    info = await api.http.get(f"/v1/sandboxes/{box}/execs/{exec_id}")
    assert info.json()["running"] is True


@pytest.mark.parametrize(
    "first",
    ["{}", "no json", '{"type":"dance"}', b"\x00", '{"type":"start"}', '{"type":"start","cmd":5}'],
)
async def test_a_first_message_without_sense_closes(api: Api, box: str, first: str | bytes) -> None:
    async with socket_to(api, box) as socket:
        await socket.send(first)
        messages, closed = await until_closed(socket)
    assert [(m["type"], m["code"]) for m in messages] == [("error", "invalid")]
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1008
    assert closed.rcvd.reason.startswith("invalid: ")


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ({"type": "start", "cmd": ["no-such-program"]}, "not_found"),
        ({"type": "start", "cmd": ["true"], "timeout_ms": 10**9}, "invalid"),
        ({"type": "start", "cmd": ["true"], "cwd": "/nowhere"}, "not_found"),
        ({"type": "attach", "exec_id": "e-unknown"}, "not_found"),
        ({"type": "attach", "exec_id": "no id at all"}, "invalid"),
    ],
)
async def test_what_cannot_start_says_why(
    api: Api, box: str, first: dict[str, Any], code: str
) -> None:
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps(first))
        messages, closed = await until_closed(socket)
    assert [(m["type"], m["code"]) for m in messages] == [("error", code)]
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1008
    assert closed.rcvd.reason.startswith(f"{code}: ")


@pytest.mark.parametrize(
    "later", ["{", '{"type":"sing"}', '{"type":"signal","signal":"LOUD"}', '{"type":"input"}']
)
async def test_a_later_message_without_sense_closes_and_the_exec_goes_on(
    api: Api, box: str, later: str
) -> None:
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps({"type": "start", "cmd": ["sleep", "60"]}))
        exec_id = json.loads(await socket.recv())["exec_id"]
        await socket.send(later)
        messages, closed = await until_closed(socket)
    assert [(m["type"], m["code"]) for m in messages] == [("error", "invalid")]
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1008
    info = await api.http.get(f"/v1/sandboxes/{box}/execs/{exec_id}")
    assert info.json()["running"] is True


@pytest.mark.parametrize("later", [b"x", '{"type":"eof"}', '{"type":"signal","signal":"TERM"}'])
async def test_who_came_to_listen_has_nothing_to_say(
    api: Api, box: str, later: str | bytes
) -> None:
    exec_id = await started(api, box, ["sleep", "60"])
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps({"type": "attach", "exec_id": exec_id, "input": False}))
        await socket.recv()
        await socket.send(later)
        messages, closed = await until_closed(socket)
    assert [(m["type"], m["code"]) for m in messages] == [("error", "invalid")]
    assert "without input" in messages[0]["message"]
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1008


async def test_a_message_that_is_too_large_closes_and_the_exec_goes_on(api: Api, box: str) -> None:
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps({"type": "start", "cmd": ["sleep", "60"]}))
        exec_id = json.loads(await socket.recv())["exec_id"]
        await socket.send(b"x" * (1024 * 1024 + 1))
        _, closed = await until_closed(socket)
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1009
    info = await api.http.get(f"/v1/sandboxes/{box}/execs/{exec_id}")
    assert info.json()["running"] is True


async def test_the_end_of_the_sandbox_is_nobodys_fault(api: Api) -> None:
    box = (await api.rpc("create", template="bash"))["id"]
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps({"type": "start", "cmd": ["sleep", "60"]}))
        await socket.recv()
        await api.rpc("delete", id=box)
        messages, closed = await until_closed(socket)
    assert [(m["type"], m["code"]) for m in messages] == [("error", "gone")]
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1001


async def test_an_unknown_sandbox_is_404_before_the_socket_opens(api: Api) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with socket_to(api, "nosuchbox"):
            pass
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "not_found"


async def test_a_socket_that_goes_is_noticed_while_nobody_takes_its_input(
    server: RealServer, api: Api, box: str
) -> None:
    await api.rpc("exec", id=box, cmd=["true"])
    before = open_files(server)
    async with socket_to(api, box) as socket:
        await socket.send(json.dumps({"type": "start", "cmd": ["sleep", "100"]}))
        await socket.recv()
        for _ in range(8):
            await socket.send(b"x" * 200_000)  # more than pipes and buffers on the way hold
        assert open_files(server) > before
        socket.transport.abort()
    await eventually(lambda: open_files(server) <= before, what="the server let go of it")


def open_files(server: RealServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
