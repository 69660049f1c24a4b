"""Start and stop of a server. After SIGTERM what runs may end, every socket gets a code, and the
exit is 0."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from capsule.edge import exec_socket
from capsule.edge.e2b.access import Access
from capsule.service import CreateRequest
from tests.api.client import Api
from tests.api.double import ServiceDouble, serving
from tests.support import clean_env, eventually
from tests.support.folders import server_folder
from tests.support.servers import CAPSULE, RealServer, real_server

pytestmark = pytest.mark.real


async def ended(server: RealServer, within: float = 15.0) -> int:
    return await asyncio.to_thread(server.process.wait, within)


def beginning(
    http: httpx.AsyncClient, box: str, token: str, volume: dict[str, str]
) -> list[Coroutine[Any, Any, httpx.Response]]:
    """Requests that begin something, as the SDK of E2B sends them."""
    headers = {"x-access-token": token, "e2b-sandbox-id": box}
    envd = {**headers, "e2b-sandbox-port": "49983"}
    interpreter = {**headers, "e2b-sandbox-port": "49999"}
    content = f"/volumecontent/{volume['volumeID']}/dir?path=/"
    return [
        http.post("/process.Process/Start", json={}, headers=envd),
        http.post("/execute", json={"code": "1"}, headers=interpreter),
        http.post("/contexts", json={}, headers=interpreter),
        http.get(content, headers={"authorization": f"Bearer {volume['token']}"}),
    ]


async def refusal(http: httpx.AsyncClient) -> httpx.Response | None:
    answer = await http.post("/v1/sandboxes", json={"template": "bash"})
    return answer if answer.status_code != 201 else None


def test_the_banner_has_three_lines_that_work(agent_binary: object) -> None:
    with real_server() as server:
        text = (server.base / "log").read_text()
        example = [line.strip() for line in text.splitlines() if "curl" in line]
        assert f"http://localhost:{server.port}" in text
        assert "isolation: namespaces" in text or "isolation: landlock" in text
        assert len(example) == 3
        script = "\n".join(example)
        done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, timeout=15)
        assert '"stdout":"42\\n"' in done.stdout
        assert '"deleted":true' in done.stdout


async def close_code(socket: Any) -> int:
    with suppress(ConnectionClosed):
        async with asyncio.timeout(15):
            while True:
                await socket.recv()
    return int(socket.close_code)


async def test_running_execs_end_and_new_work_is_refused() -> None:
    with real_server(DRAIN_TIMEOUT="60") as server:
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=30) as http:
            api = Api(http)
            box = (await api.rpc("create", template="bash"))["id"]
            volume = (await http.post("/volumes", json={"name": "v"})).json()
            token = (await asyncio.to_thread(Access.open, server.base / "data")).token(box)
            wait = "until test -e go; do sleep 0.1; done"
            loads = [
                asyncio.create_task(api.rpc("exec", id=box, cmd=f"touch on{i}; {wait}; echo {i}"))
                for i in range(10)
            ]
            url = f"ws://127.0.0.1:{server.port}/terminal/{box}?session=s"
            sockets = [await connect(f"{url}{i}", proxy=None, close_timeout=1) for i in range(3)]
            closings = [asyncio.create_task(close_code(socket)) for socket in sockets]
            count = {"id": box, "cmd": "ls on* | wc -l"}

            async def all_run() -> bool:
                return bool((await api.rpc("exec", **count))["stdout"] == "10\n")

            await eventually(all_run, what="all run")
            server.process.send_signal(signal.SIGTERM)
            answer = await eventually(lambda: refusal(http), what="creates are refused")
            assert answer is not None and answer.status_code == 503
            assert answer.json()["error"]["code"] == "unavailable"
            for answer in await asyncio.gather(*beginning(http, box, token, volume)):
                assert (answer.status_code, b"is stopping" in answer.content) == (503, True)
            put = await http.put(f"/v1/sandboxes/{box}/files/workspace/go", content=b"")
            assert put.is_success, "what the running programs need still works"
            done = await asyncio.gather(*loads)
            assert [r["stdout"] for r in done] == [f"{i}\n" for i in range(10)]
            assert await asyncio.gather(*closings) == [1012] * 3
        assert await ended(server) == 0


@pytest.mark.parametrize("how", ["drain timeout", "second signal"])
async def test_what_does_not_end_in_time_is_cut(how: str) -> None:
    seconds = "1" if how == "drain timeout" else "600"
    with real_server(DRAIN_TIMEOUT=seconds) as server:
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=30) as http:
            api = Api(http)
            box = (await api.rpc("create", template="bash"))["id"]
            url = f"/v1/sandboxes/{box}/execs"
            await api.rpc("start", id=box, cmd="sleep 100", session="s")  # watched to its end
            waiting = asyncio.create_task(http.post(url, json={"cmd": "touch run; sleep 100"}))
            running = {"id": box, "cmd": ["test", "-e", "run"]}

            async def runs() -> bool:
                return bool((await api.rpc("exec", **running))["exit_code"] == 0)

            await eventually(runs, what="it runs")
            address = f"ws://127.0.0.1:{server.port}{url.removesuffix('s')}/ws"
            socket = await connect(address, proxy=None)
            await socket.send(json.dumps({"type": "start", "cmd": ["sleep", "100"]}))
            await socket.recv()
            server.process.send_signal(signal.SIGTERM)
            if how == "second signal":
                await eventually(lambda: refusal(http), what="it drains")
                server.process.send_signal(signal.SIGINT)
            answer = await waiting
            assert answer.status_code == 503
            assert "outlive" in answer.json()["error"]["hint"]
            assert await close_code(socket) == 1012
        assert await ended(server) == 0


async def test_event_streams_that_are_cut_end() -> None:
    """Without their last event: the exec goes on. A download that is cut has no end."""
    with real_server(DRAIN_TIMEOUT="1") as server:
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=30) as http:
            api = Api(http)
            box = (await api.rpc("create", template="bash"))["id"]
            await api.rpc("exec", id=box, cmd="truncate -s 200M big")
            download = f"/v1/sandboxes/{box}/files?path=big"
            execs, accept = f"/v1/sandboxes/{box}/execs", {"Accept": "text/event-stream"}
            follow = http.stream("POST", execs, json={"cmd": "sleep 25"}, headers=accept)
            async with follow as events, http.stream("GET", download) as content:
                pieces = content.aiter_bytes()
                await anext(pieces)
                server.process.send_signal(signal.SIGTERM)
                text = "".join([each async for each in events.aiter_text()])
                with pytest.raises(httpx.TransportError):
                    async for _ in pieces:
                        pass
            assert text.startswith("event: started") and "exit" not in text
        assert await ended(server) == 0
        assert "without completing" not in (server.base / "log").read_text()


async def test_idle_connections_and_sockets_hold_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = ServiceDouble()
    async with serving(service, drain_timeout=600.0) as running:
        box = (await service.create(CreateRequest())).id
        url = f"ws://127.0.0.1:{running.port}/v1/sandboxes/{box}/exec/ws"
        async with httpx.AsyncClient(verify=False, base_url=running.url) as http:
            await http.get("/health")  # leaves a connection open
            async with connect(url, proxy=None) as socket:
                running.server.stop()
                assert await close_code(socket) == 1012
            await eventually(lambda: running.server.should_exit, what="it stops")
    assert running.service.drained == [600.0]
    monkeypatch.setattr(exec_socket, "PATIENCE", 0.1)
    async with serving(service) as running:
        url = f"ws://127.0.0.1:{running.port}/v1/sandboxes/{box}/exec/ws"
        async with connect(url, proxy=None) as socket:
            assert await close_code(socket) == 1008, "it never sent its first message"
            assert "first message" in str(socket.close_reason)


def serve(env: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    """`capsule serve` with a mistake, which ends it."""
    return subprocess.run(
        [*CAPSULE, "serve"], env={**env, **more}, capture_output=True, text=True, timeout=50
    )


@pytest.mark.timeout(100)
def test_a_server_that_cannot_listen_says_why(server: RealServer) -> None:
    data = {"CAPSULE_DATA_DIR": str(server.base / "other")}
    taken = serve(server.env, **data)
    assert taken.returncode != 0
    assert f"cannot listen on 127.0.0.1:{server.port}" in taken.stderr
    assert "--port" in taken.stderr
    without_keys = serve(server.env, CAPSULE_HOST="0.0.0.0", CAPSULE_PORT="0", **data)
    assert without_keys.returncode != 0
    assert "CAPSULE_API_KEYS" in without_keys.stderr


@pytest.mark.timeout(60)
def test_a_server_that_prints_its_address_stops_gracefully_from_then_on(
    agent_binary: object,
) -> None:
    with server_folder("ct-", mode=0o755, data=None) as base:
        dirs = {"CAPSULE_DATA_DIR": str(base / "data"), "CAPSULE_RUN_DIR": str(base / "run")}
        env = clean_env(CAPSULE_PORT="0", **dirs)
        start = [*CAPSULE, "serve", "--json"]
        with subprocess.Popen(start, env=env, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()  # returns the moment it is written
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert json.loads(line)["url"]
