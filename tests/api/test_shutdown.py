"""SIGTERM: what runs may end, what does not is cut, every socket gets a code, the exit is 0."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
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
from tests.support.servers import CAPSULE, RealServer, real_server

CREATE: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.create"}


@pytest.fixture
def base() -> Iterator[Path]:
    """Short, for sockets below it, and open to the users of sandboxes."""
    with tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def ended(server: RealServer, within: float = 15.0) -> int:
    return await asyncio.to_thread(server.process.wait, within)


@pytest.mark.real
async def test_stopping_with_execs_and_terminals_under_way(agent_binary: object) -> None:
    with real_server(DRAIN_TIMEOUT="8") as server:
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=30) as http:
            api = Api(http)
            box = (await api.rpc("create", template="bash"))["id"]
            volume = (await http.post("/volumes", json={"name": "v"})).json()
            token = (await asyncio.to_thread(Access.open, server.base / "data")).token(box)
            loads = [
                asyncio.create_task(
                    api.rpc("exec", id=box, cmd=f"echo {i} >> begun; sleep 2; echo {i}")
                )
                for i in range(20)
            ]
            sockets = [
                await connect(
                    f"ws://127.0.0.1:{server.port}/terminal/{box}?session=s{i}", proxy=None
                )
                for i in range(5)
            ]
            closings = [asyncio.create_task(closing_of(socket)) for socket in sockets]
            await eventually(lambda: lines(api, box, "begun", 20), what="20 execs run")
            server.process.send_signal(signal.SIGTERM)
            refused = await eventually(lambda: refusal(http), what="creates are refused")
            assert refused is not None
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "unavailable"
            for answer in await asyncio.gather(*beginning(http, box, token, volume)):
                assert (answer.status_code, b"is stopping" in answer.content) == (503, True)
            assert [r["stdout"] for r in await asyncio.gather(*loads)] == [
                f"{i}\n" for i in range(20)
            ]
            assert [c.rcvd.code for c in await asyncio.gather(*closings) if c.rcvd] == [1012] * 5
        assert await ended(server) == 0


def beginning(
    http: httpx.AsyncClient, box: str, token: str, volume: dict[str, str]
) -> list[Coroutine[Any, Any, httpx.Response]]:
    """What begins something behind E2B's doors."""
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


async def closing_of(socket: Any) -> ConnectionClosed:
    try:
        while True:
            await socket.recv()
    except ConnectionClosed as closed:
        return closed


async def lines(api: Api, box: str, path: str, count: int) -> bool:
    result = await api.rpc("exec", id=box, cmd=f"wc -l < {path}")
    return str(result["stdout"]).strip() == str(count)


async def refusal(http: httpx.AsyncClient) -> httpx.Response | None:
    answer = await http.post("/v1/sandboxes", json={"template": "bash"})
    return answer if answer.status_code != 201 else None


@pytest.mark.real
async def test_what_does_not_end_in_time_is_cut(agent_binary: object) -> None:
    with real_server(DRAIN_TIMEOUT="3") as server:
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=30) as http:
            api = Api(http)
            box = (await api.rpc("create", template="bash"))["id"]
            url = f"/v1/sandboxes/{box}/execs"
            await api.rpc("start", id=box, cmd="sleep 25", session="s")  # looked after to its end
            body = {"cmd": "touch running; sleep 25"}
            waiting = asyncio.create_task(http.post(url, json=body))
            await eventually(lambda: exists(api, box, "running"), what="it runs")
            socket = await connect(
                f"ws://127.0.0.1:{server.port}{url.removesuffix('s')}/ws", proxy=None
            )
            await socket.send(json.dumps({"type": "start", "cmd": ["sleep", "25"]}))
            await socket.recv()
            server.process.send_signal(signal.SIGTERM)
            signalled = time.monotonic()
            answer = await waiting
            assert answer.status_code == 503
            assert "outlive" in answer.json()["error"]["hint"]
            closed = await closing_of(socket)
            assert closed.rcvd is not None and closed.rcvd.code == 1012
        assert await ended(server) == 0
        assert time.monotonic() - signalled < 5.5  # not the timeout twice


@pytest.mark.real
async def test_event_streams_that_are_cut_end(agent_binary: object) -> None:
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


async def exists(api: Api, box: str, path: str) -> bool:
    result = await api.rpc("exec", id=box, cmd=["test", "-e", path])
    return bool(result["exit_code"] == 0)


@pytest.mark.real
async def test_a_second_signal_does_not_wait(agent_binary: object) -> None:
    with real_server(DRAIN_TIMEOUT="60") as server:
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=30) as http:
            api = Api(http)
            box = (await api.rpc("create", template="bash"))["id"]
            await api.rpc("start", id=box, cmd="sleep 25", session="s")  # looked after to its end
            body = {"cmd": "touch running; sleep 25"}
            waiting = asyncio.create_task(http.post(f"/v1/sandboxes/{box}/execs", json=body))
            await eventually(lambda: exists(api, box, "running"), what="it runs")
            server.process.send_signal(signal.SIGTERM)
            await eventually(lambda: refusal(http), what="it drains")
            server.process.send_signal(signal.SIGINT)
            assert (await waiting).status_code == 503
        assert await ended(server) == 0


@pytest.mark.real
def test_a_server_that_has_said_it_listens_stops_gracefully(
    agent_binary: object, base: Path
) -> None:
    dirs = {"CAPSULE_DATA_DIR": str(base / "data"), "CAPSULE_RUN_DIR": str(base / "run")}
    env = clean_env(CAPSULE_PORT="0", **dirs)
    start = [*CAPSULE, "serve", "--json"]
    with subprocess.Popen(start, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()  # returns the moment it is written
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert json.loads(said)["url"]


async def test_an_idle_server_stops_at_once() -> None:
    async with serving(drain_timeout=60.0) as running:
        async with httpx.AsyncClient(verify=False, base_url=running.url) as http:
            await http.get("/health")  # leaves a connection open
            running.server.stop()
            await eventually(lambda: running.server.should_exit, what="it stops", within=5)
    assert running.service.drained == [60.0]


async def test_a_socket_that_has_not_begun_anything_holds_nothing_up() -> None:
    service = ServiceDouble()
    async with serving(service, drain_timeout=60.0) as running:
        box = (await service.create(CreateRequest())).id
        url = f"ws://127.0.0.1:{running.port}/v1/sandboxes/{box}/exec/ws"
        async with connect(url, proxy=None) as socket:
            running.server.stop()
            closed = await asyncio.wait_for(closing_of(socket), 5)
    assert closed.rcvd is not None and closed.rcvd.code == 1012


async def test_a_socket_that_never_begins_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_socket, "PATIENCE", 0.1)
    service = ServiceDouble()
    async with serving(service) as running:
        box = (await service.create(CreateRequest())).id
        url = f"ws://127.0.0.1:{running.port}/v1/sandboxes/{box}/exec/ws"
        async with connect(url, proxy=None) as socket:
            closed = await asyncio.wait_for(closing_of(socket), 5)
    assert closed.rcvd is not None and closed.rcvd.code == 1008
    assert "first message" in closed.rcvd.reason


async def test_while_it_drains_new_work_is_refused_and_old_work_ends() -> None:
    release = asyncio.Event()

    async def held() -> bytes:
        await release.wait()
        return b"done"

    service = ServiceDouble(lambda call: held())
    async with serving(service, drain_timeout=20.0) as running:
        async with httpx.AsyncClient(verify=False, base_url=running.url) as http:
            box = (await http.post("/v1/sandboxes")).json()["id"]
            url = f"/v1/sandboxes/{box}/execs"
            waiting = asyncio.create_task(http.post(url, json={"cmd": ["x"]}))
            await eventually(lambda: running.server._gate._requests, what="it waits")
            running.server.stop()
            await asyncio.sleep(0)
            health = await http.get("/health")
            create = await http.post("/rpc", json=CREATE)
            exec = await http.post(url, json={"cmd": ["x"]})
            release.set()
            assert (await waiting).json()["stdout"] == "done"
    assert (health.status_code, health.json()) == (503, {"status": "stopping"})
    assert create.json()["error"]["data"]["code"] == "unavailable"
    assert (exec.status_code, exec.headers["retry-after"]) == (503, "1")


@pytest.mark.real
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


@pytest.mark.real
def test_a_port_that_is_taken_is_said_so(server: RealServer) -> None:
    env = {**server.env, "CAPSULE_DATA_DIR": str(server.base / "other")}
    done = subprocess.run([*CAPSULE, "serve"], env=env, capture_output=True, text=True, timeout=15)
    assert done.returncode != 0
    assert f"cannot listen on 127.0.0.1:{server.port}" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.real
def test_it_refuses_to_listen_to_others_without_keys(server: RealServer) -> None:
    env = {**server.env, "CAPSULE_HOST": "0.0.0.0", "CAPSULE_PORT": "0"}
    done = subprocess.run([*CAPSULE, "serve"], env=env, capture_output=True, text=True, timeout=15)
    assert done.returncode != 0
    assert "CAPSULE_API_KEYS" in done.stderr
