"""A real shell on a real terminal, over the seeds' two URLs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from tests.api.client import Api
from tests.support import eventually

pytestmark = pytest.mark.real


class Screen:
    """What a viewer sees; everything that came, in order."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.text = ""
        self.messages: list[str | bytes] = []

    async def type(self, text: str | bytes) -> None:
        await self.socket.send(text)

    async def until(self, wanted: str, within: float = 10.0) -> str:
        """Read on until `wanted` is on the screen, and return what came up to there."""
        async with asyncio.timeout(within):
            while wanted not in self.text:
                await self._take()
        seen, self.text = self.text.split(wanted, 1)
        return seen

    async def end(self, within: float = 10.0) -> ConnectionClosed:
        async with asyncio.timeout(within):
            while True:
                try:
                    await self._take()
                except ConnectionClosed as closed:
                    return closed

    async def _take(self) -> None:
        message = await self.socket.recv()
        self.messages.append(message)
        self.text += message if isinstance(message, str) else message.decode("utf-8", "replace")


@asynccontextmanager
async def terminal(
    api: Api, box: str, *, url: str = "/terminal/{id}", query: str = "", framed: bool = False
) -> AsyncIterator[Screen]:
    address = f"ws://{api.http.base_url.host}:{api.http.base_url.port}"
    protocols = [Subprotocol("capsule.terminal.v1")] if framed else None
    path = f"{url.format(id=box)}?{query}"
    async with connect(address + path, subprotocols=protocols, proxy=None) as socket:
        yield Screen(socket)


@pytest.mark.parametrize("url", ["/terminal/{id}", "/sandbox/{id}/stream"])
async def test_a_shell_answers_in_text(api: Api, box: str, url: str) -> None:
    async with terminal(api, box, url=url) as screen:
        await screen.type("echo $((6 * 7))-is-it\n")
        await screen.until("42-is-it")
        assert all(isinstance(message, str) for message in screen.messages)


async def test_it_is_a_real_terminal_in_the_workspace(api: Api, box: str) -> None:
    async with terminal(api, box) as screen:
        await screen.type("test -t 0 && test -t 1 && tty && pwd && echo TERM=$TERM.\n")
        seen = await screen.until("TERM=xterm")
        assert "/dev/pts/" in seen
        assert "/workspace" in seen


async def test_control_c_stops_the_program_and_not_the_shell(api: Api, box: str) -> None:
    async with terminal(api, box) as screen:
        await screen.type("sleep 100\n")
        await eventually(lambda: runs(api, box, "sleep 100"), what="sleep runs")
        await screen.type("\x03")
        await screen.type("echo status-$?\n")
        await screen.until("status-130")


async def test_job_control(api: Api, box: str) -> None:
    async with terminal(api, box) as screen:
        await screen.type("sleep 100\n")
        await eventually(lambda: runs(api, box, "sleep 100"), what="sleep runs")
        await screen.type("\x1a")
        await screen.until("Stopped")
        await screen.type("jobs; kill %1; echo job-$((3 + 4))\n")
        await screen.until("job-7")


async def runs(api: Api, box: str, command: str) -> bool:
    shown = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done 2>/dev/null"
    result = await api.rpc("exec", id=box, cmd=["bash", "-c", f"{shown} | grep -x '{command} '"])
    return bool(result["exit_code"] == 0)


async def test_text_of_many_languages_is_never_split(api: Api, box: str) -> None:
    line = "grün 日本語 🎉 "
    async with terminal(api, box) as screen:
        await screen.type("stty -echo; PS1=; echo quiet-$((1 + 1))\n")
        await screen.until("quiet-2")
        await screen.type(f"yes '{line}' | head -c 300000; echo; echo over-$((1 + 1))\n")
        seen = await screen.until("over-2")
        assert "�" not in seen.replace(line, "").strip()[:-8]
        assert seen.count("日本語") >= 300_000 // len((line + "\n").encode()) - 1


async def test_bytes_for_those_who_ask_for_them(api: Api, box: str) -> None:
    async with terminal(api, box, query="encoding=binary") as screen:
        await screen.type(b"printf '\\xff\\xfe'; echo bin-$((1 + 1))\n")
        await screen.until("bin-2")
        assert all(isinstance(message, bytes) for message in screen.messages)
        assert b"\xff\xfe" in b"".join(m for m in screen.messages if isinstance(m, bytes))


async def test_the_size_to_begin_with(api: Api, box: str) -> None:
    async with terminal(api, box, query="rows=33&cols=111") as screen:
        await screen.type("stty size\n")
        await screen.until("33 111")


async def test_framed_terminals_resize_and_tell_the_exit(api: Api, box: str) -> None:
    async with terminal(api, box, framed=True, query="rows=20&cols=70") as screen:
        opened = json.loads(await screen.socket.recv())
        assert opened["type"] == "opened"
        assert opened["session"] == "main"
        await screen.type(json.dumps({"type": "resize", "rows": 40, "cols": 120}))
        await screen.type(b"stty size\n")
        await screen.until("40 120")
        await screen.type(json.dumps({"type": "input", "data": "exit 5\n"}))
        closed = await screen.end()
    last = json.loads(screen.messages[-1])
    assert (last["type"], last["exit_code"]) == ("exit", 5)
    assert closed.rcvd is not None and closed.rcvd.code == 1000
    assert all(isinstance(m, bytes) for m in screen.messages[:-1])


@pytest.mark.parametrize("message", ["{", '{"type":"fly"}', '{"type":"resize","rows":0,"cols":9}'])
async def test_control_messages_without_sense_close_with_a_reason(
    api: Api, box: str, message: str
) -> None:
    async with terminal(api, box, framed=True) as screen:
        await screen.type(message)
        closed = await screen.end()
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1008
    assert "invalid" in closed.rcvd.reason


async def test_json_typed_into_a_raw_terminal_is_only_text(api: Api, box: str) -> None:
    async with terminal(api, box) as screen:
        await screen.type('{"type":"resize","rows":1,"cols":1}')
        await screen.type("\x15stty size\n")  # Ctrl-U takes the line back
        await screen.until("24 80")


async def test_several_viewers_share_one_shell(api: Api, box: str) -> None:
    async with terminal(api, box) as one, terminal(api, box) as two:
        await one.type("SHARED=yes; echo from-one-$((1 + 1))\n")
        await asyncio.gather(one.until("from-one-2"), two.until("from-one-2"))
        await two.type("echo $SHARED-$((2 + 2))\n")
        await asyncio.gather(one.until("yes-4"), two.until("yes-4"))


async def test_another_session_is_another_shell(api: Api, box: str) -> None:
    async with terminal(api, box) as one, terminal(api, box, query="session=other") as two:
        await one.type("MINE=1; echo set-$((1 + 1))\n")
        await one.until("set-2")
        await two.type("echo mine=$MINE.\n")
        await two.until("mine=.")


async def test_coming_back_finds_the_same_shell_and_its_screen(api: Api, box: str) -> None:
    async with terminal(api, box) as screen:
        await screen.type("KEPT=still-here; echo first-$((1 + 1))\n")
        await screen.until("first-2")
    async with terminal(api, box) as screen:
        await screen.until("first-2")
        await screen.type("echo $KEPT-$((2 + 2))\n")
        await screen.until("still-here-4")


async def test_the_shells_exit_closes_with_its_reason(api: Api, box: str) -> None:
    async with terminal(api, box) as screen:
        await screen.type("exit 3\n")
        closed = await screen.end()
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1000
    assert "3" in closed.rcvd.reason


async def test_the_end_of_the_sandbox_closes_with_its_reason(api: Api) -> None:
    made = await api.rpc("create", template="bash")
    async with terminal(api, made["id"]) as screen:
        await screen.type("echo up-$((1 + 1))\n")
        await screen.until("up-2")
        await api.rpc("delete", id=made["id"])
        closed = await screen.end()
    assert closed.rcvd is not None
    assert closed.rcvd.code == 1001
    assert closed.rcvd.reason


async def test_an_unknown_sandbox_is_a_404(api: Api) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with terminal(api, "nosuchbox"):
            pass
    assert refused.value.response.status_code == 404


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("rows=0", "rows: expected `int` >= 1, got '0'"),
        ("cols=99999", "cols: expected `int` <= 4096, got '99999'"),
        ("rows=x", "rows: expected `int`, got 'x'"),
        ("session=../x", "session: '../x' is no name, allowed: "),
        ("session=a.b", "session: 'a.b' is no name, allowed: "),
        ("encoding=morse", "encoding: invalid enum value 'morse', got 'morse'"),
        ("a=b", "query: object contains unknown field `a`"),
    ],
)
async def test_a_query_without_sense_is_a_400(api: Api, box: str, query: str, message: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with terminal(api, box, query=query):
            pass
    assert refused.value.response.status_code == 400
    error = json.loads(refused.value.response.body or b"")["error"]
    assert error["message"].startswith(message)


async def test_a_viewer_who_does_not_read_does_not_hold_up_others(api: Api, box: str) -> None:
    async with terminal(api, box) as lazy, terminal(api, box) as awake:
        lazy.socket.transport.pause_reading()
        await awake.type("head -c 20000000 /dev/zero | tr '\\0' x; echo; echo done-$((1 + 1))\n")
        await awake.until("done-2", within=15)
        answer = await api.rpc("exec", id=box, cmd=["echo", "alive"])
        assert answer["stdout"] == "alive\n"
        lazy.socket.transport.resume_reading()


async def test_resize_by_rpc(api: Api, box: str) -> None:
    started = await api.rpc(
        "start", id=box, cmd="read x; stty size", tty={"rows": 10, "cols": 20}, stdin_open=True
    )
    exec_id: Any = started["exec_id"]
    await api.rpc("resize", id=box, exec_id=exec_id, rows=77, cols=99)
    await api.rpc("sendInput", id=box, exec_id=exec_id, data="\n")

    async def size() -> bool:
        seen = await api.rpc("attach", id=box, exec_id=exec_id, wait_ms=1000)
        return "77 99" in seen["stdout"]

    await eventually(size, what="the new size")
