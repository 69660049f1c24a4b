"""A shell on a real terminal, over both URLs: raw, binary and framed, shared and resumed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from capsule.service.terminal import MAX_VIEWERS
from tests.api.client import Api
from tests.support import eventually

pytestmark = pytest.mark.real


class Screen:
    """What a viewer sees: everything that came, in order."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.text = ""
        self.messages: list[str | bytes] = []

    async def type(self, text: str | bytes) -> None:
        await self.socket.send(text)

    async def until(self, wanted: str) -> str:
        """Read on until `wanted` is on the screen, and return what came up to there."""
        async with asyncio.timeout(15):
            while wanted not in self.text:
                await self._take()
        seen, self.text = self.text.split(wanted, 1)
        return seen

    async def end(self) -> tuple[int, str]:
        """The code and reason of the close."""
        async with asyncio.timeout(15):
            while True:
                try:
                    await self._take()
                except ConnectionClosed as closed:
                    assert closed.rcvd is not None
                    return closed.rcvd.code, closed.rcvd.reason

    async def _take(self) -> None:
        message = await self.socket.recv()
        self.messages.append(message)
        self.text += message if isinstance(message, str) else message.decode("utf-8", "replace")


@asynccontextmanager
async def terminal(
    api: Api, box: str, query: str = "", *, url: str = "/terminal/{id}", framed: bool = False
) -> AsyncIterator[Screen]:
    address = f"ws://{api.http.base_url.host}:{api.http.base_url.port}{url.format(id=box)}?{query}"
    protocols = [Subprotocol("capsule.terminal.v1")] if framed else None
    # A client that closes with unread messages waits this long for the answer to its close.
    async with connect(address, subprotocols=protocols, proxy=None, close_timeout=1) as socket:
        yield Screen(socket)


@pytest.mark.parametrize("url", ["/terminal/{id}", "/sandbox/{id}/stream"])
async def test_a_shell_on_a_terminal_answers_in_text(api: Api, box: str, url: str) -> None:
    async with terminal(api, box, "rows=33&cols=111", url=url) as screen:
        await screen.type("test -t 0 && tty && pwd && stty size && echo TERM=$TERM.\n")
        seen = await screen.until("TERM=xterm")
        assert "/dev/pts/" in seen and "/workspace" in seen and "33 111" in seen
        await screen.type('{"type":"resize","rows":1,"cols":1}')  # typed text, no message
        await screen.type("\x15stty size; echo size-$((1 + 1))\n")  # Ctrl-U takes the line back
        assert "33 111" in await screen.until("size-2")
        assert all(isinstance(message, str) for message in screen.messages)
        await screen.type("exit 3\n")
        code, reason = await screen.end()
    assert (code, "3" in reason) == (1000, True)


async def test_control_c_and_control_z_reach_the_program(api: Api, box: str) -> None:
    async with terminal(api, box) as screen:
        for seconds, key, status in ((100, "\x03", 130), (200, "\x1a", 148)):
            await screen.type(f"sleep {seconds}\n")
            command = f"sleep {seconds}"
            await eventually(lambda: runs(api, box, command), what=f"{command} runs")  # noqa: B023
            await screen.type(key)
            await screen.type("echo status-$?\n")
            await screen.until(f"status-{status}")


async def runs(api: Api, box: str, command: str) -> bool:
    shown = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done 2>/dev/null"
    result = await api.rpc("exec", id=box, cmd=["bash", "-c", f"{shown} | grep -x '{command} '"])
    return bool(result["exit_code"] == 0)


async def test_a_framed_terminal_resizes_and_sends_the_exit(api: Api, box: str) -> None:
    async with terminal(api, box, "rows=20&cols=70", framed=True) as screen:
        opened = json.loads(await screen.socket.recv())
        assert (opened["type"], opened["session"]) == ("opened", "main")
        await screen.type(json.dumps({"type": "resize", "rows": 40, "cols": 120}))
        await screen.type(b"stty size\n")
        await screen.until("40 120")
        await screen.type(json.dumps({"type": "input", "data": "exit 5\n"}))
        code, _ = await screen.end()
    last = json.loads(screen.messages[-1])
    assert (last["type"], last["exit_code"], code) == ("exit", 5, 1000)
    assert all(isinstance(m, bytes) for m in screen.messages[:-1])


@pytest.mark.parametrize("message", ["{", '{"type":"fly"}', '{"type":"resize","rows":0,"cols":9}'])
async def test_a_wrong_control_message_closes_with_a_reason(
    api: Api, box: str, message: str
) -> None:
    async with terminal(api, box, framed=True) as screen:
        await screen.type(message)
        code, reason = await screen.end()
    assert (code, "invalid" in reason) == (1008, True)


async def test_viewers_share_a_session_and_find_it_again(api: Api, box: str) -> None:
    async with terminal(api, box) as one, terminal(api, box) as two:
        await one.type("SHARED=yes; echo from-one-$((1 + 1))\n")
        await asyncio.gather(one.until("from-one-2"), two.until("from-one-2"))
        await two.type("echo $SHARED-$((2 + 2))\n")
        await asyncio.gather(one.until("yes-4"), two.until("yes-4"))
    async with terminal(api, box) as screen, terminal(api, box, "session=other") as other:
        await screen.until("yes-4")
        await screen.type("echo $SHARED-$((3 + 3))\n")
        await screen.until("yes-6")
        await other.type("echo shared=$SHARED.\n")
        await other.until("shared=.")


async def test_so_many_may_watch_one_shell(api: Api, box: str) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            await stack.enter_async_context(terminal(api, box))
        with pytest.raises(InvalidStatus) as refused:
            await stack.enter_async_context(terminal(api, box))
        assert refused.value.response.status_code == 429


async def test_the_end_of_the_sandbox_closes_with_its_reason(api: Api) -> None:
    made = await api.rpc("create", template="bash")
    async with terminal(api, made["id"]) as screen:
        await screen.type("echo up-$((1 + 1))\n")
        await screen.until("up-2")
        await api.rpc("delete", id=made["id"])
        code, reason = await screen.end()
    assert code == 1001 and reason


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("rows=0", "rows: expected `int` >= 1, got '0'"),
        ("rows=x", "rows: expected `int`, got 'x'"),
        ("session=../x", "session: '../x' is no name, allowed: "),
        ("encoding=morse", "encoding: invalid enum value 'morse', got 'morse'"),
        ("a=b", "query: object contains unknown field `a`"),
    ],
)
async def test_a_wrong_query_is_a_400(api: Api, box: str, query: str, message: str) -> None:
    for id, status in ((box, 400), ("nosuchbox", 404)):
        with pytest.raises(InvalidStatus) as refused:
            async with terminal(api, id, query if id == box else ""):
                pass
        assert refused.value.response.status_code == status
        error = json.loads(refused.value.response.body or b"")["error"]
        assert error["message"].startswith(message if id == box else "")


async def test_a_viewer_who_does_not_read_does_not_hold_up_others(api: Api, box: str) -> None:
    async with terminal(api, box) as lazy, terminal(api, box) as awake:
        lazy.socket.transport.pause_reading()
        # More than the sockets' buffers and the kept output hold.
        await awake.type("head -c 12000000 /dev/zero | tr '\\0' x; echo; echo done-$((1 + 1))\n")
        await awake.until("done-2")
        lazy.socket.transport.resume_reading()


async def test_resize_by_rpc(api: Api, box: str) -> None:
    tty: dict[str, Any] = {"tty": {"rows": 10, "cols": 20}, "stdin_open": True}
    exec_id = (await api.rpc("start", id=box, cmd="read x; stty size", **tty))["exec_id"]
    await api.rpc("resize", id=box, exec_id=exec_id, rows=77, cols=99)
    await api.rpc("sendInput", id=box, exec_id=exec_id, data="\n")

    async def resized() -> bool:
        seen = await api.rpc("attach", id=box, exec_id=exec_id, wait_ms=1000)
        return "77 99" in seen["stdout"]

    await eventually(resized, what="the new size")
