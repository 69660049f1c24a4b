"""Pause, resume, snapshots, forks, metrics and the network, through E2B's own SDK."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from e2b import (
    E2B,
    AsyncSandbox,
    CommandExitException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
)

from tests.support import eventually, wait_for
from tests.support.servers import RealServer

pytestmark = pytest.mark.real

NOBODYS = "abcdefghijklmnop"
HOUR = timedelta(hours=1)
Run = Callable[[str, str], str]


@pytest.fixture
def run(place: RealServer) -> Iterator[Run]:
    """A command in a sandbox, and what it printed."""
    with httpx.Client(base_url=place.url, timeout=30) as http:

        def once(id: str, command: str) -> str:
            done = http.post(f"/v1/sandboxes/{id}/execs", json={"cmd": ["sh", "-c", command]})
            assert done.status_code == 200, done.text
            text: str = done.json()["stdout"]
            return text

        yield once


def start(place: RealServer, id: str, command: str) -> None:
    """And leave it running."""
    url = f"{place.url}/v1/sandboxes/{id}/execs"
    body = {"cmd": ["sh", "-c", command]}
    httpx.post(url, params={"wait": "false"}, json=body).raise_for_status()


def test_a_pause_keeps_programs(sandbox: Sandbox, e2b: E2B, run: Run, place: RealServer) -> None:
    start(place, sandbox.sandbox_id, "sleep 1000")
    run(sandbox.sandbox_id, "echo kept > file")
    assert sandbox.pause() is True
    assert sandbox.pause() is False
    assert not sandbox.is_running()
    assert sandbox.get_info().state == SandboxState.PAUSED
    again = e2b.Sandbox.connect(sandbox.sandbox_id)
    assert again.is_running()
    assert again._envd_access_token == sandbox._envd_access_token
    assert run(sandbox.sandbox_id, "cat file; pgrep -c sleep") == "kept\n1\n"


def test_a_pause_of_files_alone_ends_programs(
    sandbox: Sandbox, e2b: E2B, run: Run, place: RealServer
) -> None:
    id = sandbox.sandbox_id
    start(place, id, "sleep 1000")
    run(id, "echo kept > file; pgrep sleep")
    assert sandbox.pause(keep_memory=False) is True
    assert detail(place, id)["pauseMode"] == "filesystem"
    e2b.Sandbox.connect(id)
    assert run(id, "cat file; pgrep -c sleep; true") == "kept\n0\n"
    assert "pauseMode" not in detail(place, id)


def test_a_resume_may_leave_memory_behind(
    sandbox: Sandbox, e2b: E2B, run: Run, place: RealServer
) -> None:
    id = sandbox.sandbox_id
    start(place, id, "sleep 1000")
    run(id, "echo kept > file")
    sandbox.pause()
    assert detail(place, id)["pauseMode"] == "full"
    e2b.Sandbox.connect(id, on_resume="reboot")
    assert run(id, "cat file; pgrep -c sleep; true") == "kept\n0\n"


def detail(place: RealServer, id: str) -> dict[str, object]:
    found: dict[str, object] = httpx.get(f"{place.url}/sandboxes/{id}").json()
    return found


def test_the_time_of_a_paused_one_stands_still(e2b: E2B) -> None:
    sandbox = e2b.Sandbox.create(timeout=60)
    sandbox.pause()
    assert sandbox.get_info().end_at > datetime.now(UTC) + timedelta(days=1)
    sandbox.connect(timeout=100)
    left = sandbox.get_info().end_at - datetime.now(UTC)
    assert timedelta(seconds=80) < left <= timedelta(seconds=101)
    sandbox.kill()


async def test_paused_ones_are_listed_by_state(e2b: E2B) -> None:
    mark = {"mark": str(uuid.uuid4())}
    one, two = await asyncio.gather(*(e2b.AsyncSandbox.create(metadata=mark) for _ in range(2)))
    await one.pause()

    async def listed(*states: SandboxState) -> set[str]:
        query = SandboxQuery(metadata=mark, state=list(states) or None)
        found = await e2b.AsyncSandbox.list(query=query).next_items()
        return {each.sandbox_id for each in found}

    assert await listed(SandboxState.PAUSED) == {one.sandbox_id}
    assert await listed(SandboxState.RUNNING) == {two.sandbox_id}
    assert await listed() == {one.sandbox_id, two.sandbox_id}
    assert all(await asyncio.gather(one.kill(), two.kill()))


@pytest.mark.parametrize("mode", ["full", "filesystem"])
async def test_it_is_paused_at_its_timeout(e2b: E2B, mode: str, run: Run) -> None:
    lifecycle: Any = {"on_timeout": {"action": "pause", "mode": mode}}
    sandbox = await e2b.AsyncSandbox.create(lifecycle=lifecycle)
    await asyncio.to_thread(run, sandbox.sandbox_id, "echo kept > file")
    info = await sandbox.get_info()
    assert info.lifecycle == {"on_timeout": "pause", "auto_resume": False}
    await sandbox.set_timeout(0)

    async def paused() -> bool:
        return (await sandbox.get_info()).state == SandboxState.PAUSED

    await eventually(paused, what="it is paused", within=20)
    await sandbox.connect()
    assert await asyncio.to_thread(run, sandbox.sandbox_id, "cat file") == "kept\n"
    await sandbox.kill()


async def test_traffic_wakes_one_that_may_be_woken(e2b: E2B) -> None:
    sandbox = await e2b.AsyncSandbox.create(lifecycle={"on_timeout": "pause", "auto_resume": True})
    assert (await sandbox.get_info()).lifecycle == {"on_timeout": "pause", "auto_resume": True}
    await sandbox.pause()
    assert await sandbox.is_running()
    await sandbox.kill()


def test_a_snapshot_is_a_template(sandbox: Sandbox, e2b: E2B, run: Run) -> None:
    run(sandbox.sandbox_id, "echo one > file")
    made = sandbox.create_snapshot()
    run(sandbox.sandbox_id, "echo two > file")
    with e2b.Sandbox.create(made.snapshot_id) as other:
        assert run(other.sandbox_id, "cat file") == "one\n"
        info = other.get_info()
        assert info.template_id == made.snapshot_id
    assert sandbox.is_running()
    assert made.names == []
    assert e2b.Sandbox.delete_snapshot(made.snapshot_id) is True
    assert e2b.Sandbox.delete_snapshot(made.snapshot_id) is False
    with pytest.raises(SandboxException, match="404: "):
        e2b.Sandbox.create(made.snapshot_id)


def test_metadata_of_files_is_kept_with_them(sandbox: Sandbox, e2b: E2B) -> None:
    sandbox.files.write("noted", "x", metadata={"author": "somebody"})
    made = sandbox.create_snapshot()
    (fork,) = sandbox.fork(timeout=60)
    sandbox.pause(keep_memory=False)
    sandbox.connect()
    started = e2b.Sandbox.create(made.snapshot_id, timeout=60)
    assert isinstance(fork, Sandbox)
    for each in (sandbox, fork, started):
        assert each.files.get_info("noted").metadata == {"author": "somebody"}
    fork.kill()
    started.kill()
    e2b.Sandbox.delete_snapshot(made.snapshot_id)


def test_a_named_snapshot_may_be_made_again(sandbox: Sandbox, e2b: E2B, run: Run) -> None:
    name = f"snap-{uuid.uuid4().hex[:8]}"
    for text in ("one", "two"):
        run(sandbox.sandbox_id, f"echo {text} > file")
        made = sandbox.create_snapshot(name=name, mode="filesystem")
        assert made.snapshot_id == f"{name}:default"
        assert made.names == [f"{name}:default"]
    tagged = sandbox.create_snapshot(name=f"{name}:v2")
    assert tagged.snapshot_id == f"{name}:v2"
    with e2b.Sandbox.create(name) as other:
        assert run(other.sandbox_id, "cat file") == "two\n"
    found = e2b.Sandbox.list_snapshots(name=name).next_items()
    assert {each.snapshot_id for each in found} == {made.snapshot_id, tagged.snapshot_id}
    found = e2b.Sandbox.list_snapshots(name=f"{name}:v2").next_items()
    assert [each.snapshot_id for each in found] == [tagged.snapshot_id]
    for each in (made, tagged):
        assert e2b.Sandbox.delete_snapshot(each.snapshot_id) is True


def test_snapshots_are_listed_in_pages(sandbox: Sandbox, e2b: E2B) -> None:
    made = [sandbox.create_snapshot().snapshot_id for _ in range(3)]
    own: Any = sandbox  # its overloads confuse mypy
    pages, found = own.list_snapshots(limit=2), []
    while pages.has_next:
        found.append([each.snapshot_id for each in pages.next_items()])
    assert found == [[made[2], made[1]], [made[0]]]
    for each in made:
        e2b.Sandbox.delete_snapshot(each)
    assert own.list_snapshots().next_items() == []


def test_a_name_of_a_template_is_taken(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match="409: python is a template already"):
        sandbox.create_snapshot(name="python")
    with pytest.raises(SandboxException, match="400: name: 'a b' is none"):
        sandbox.create_snapshot(name="a b")


def test_a_fork_has_the_same_files(sandbox: Sandbox, e2b: E2B, run: Run) -> None:
    run(sandbox.sandbox_id, "echo one > file")
    made = sandbox.fork(count=2, timeout=90)
    forks = [each for each in made if isinstance(each, Sandbox)]
    assert len(forks) == 2
    ids = {sandbox.sandbox_id, *(each.sandbox_id for each in forks)}
    assert len(ids) == 3
    for each in forks:
        assert run(each.sandbox_id, "cat file; echo mine > file") == "one\n"
        left = each.get_info().end_at - datetime.now(UTC)
        assert timedelta(seconds=60) < left <= timedelta(seconds=91)
        assert each._envd_access_token != sandbox._envd_access_token
        assert each.kill()
    assert run(sandbox.sandbox_id, "cat file") == "one\n"


def test_a_network_that_denies_is_kept_and_shown(sandbox: Sandbox) -> None:
    assert sandbox.get_info().network is None
    sandbox.update_network({"deny_out": ["0.0.0.0/0"], "allow_internet_access": False})
    assert sandbox.get_info().network == {"deny_out": ["0.0.0.0/0"]}
    sandbox.update_network({})
    assert sandbox.get_info().network == {}


@pytest.mark.parametrize(
    "network",
    [
        {"allow_out": ["1.1.1.1"]},
        {"dns_servers": ["8.8.8.8"]},
        {"egress_proxy": {"address": "proxy.example:1080"}},
        {"rules": {"api.example.com": [{"transform": {"headers": {"a": "b"}}}]}},
    ],
)
def test_a_network_that_cannot_be_given_is_refused(shared: Sandbox, e2b: E2B, network: Any) -> None:
    with pytest.raises(SandboxException, match=r"400: .*have no network"):
        e2b.Sandbox.create(network=network)
    with pytest.raises(SandboxException, match=r"400: .*have no network"):
        shared.update_network(network)


def test_the_internet_is_not_promised(e2b: E2B) -> None:
    with pytest.raises(SandboxException, match="400: allow_internet_access: cannot be given"):
        e2b.Sandbox.create(allow_internet_access=True)
    with e2b.Sandbox.create(allow_internet_access=False, network={"deny_out": ["8.8.8.8"]}) as made:
        info = made.get_info()
        assert info.allow_internet_access is False
        assert info.network == {"deny_out": ["8.8.8.8"]}


def test_traffic_that_is_not_public_has_a_token(e2b: E2B, place: RealServer) -> None:
    with e2b.Sandbox.create() as everybodys:
        assert everybodys.traffic_access_token is None
    with e2b.Sandbox.create(network={"allow_public_traffic": False}) as made:
        assert made.traffic_access_token
        made.update_network({"deny_out": ["8.8.8.8"]})
        again = e2b.Sandbox.connect(made.sandbox_id)
        assert again.traffic_access_token == made.traffic_access_token


def test_what_is_not_there_is_refused_clearly(e2b: E2B) -> None:
    iam: Any = {"tokens": {"aws": {"audience": "a", "token_type": "JWT-SVID"}}}
    with pytest.raises(SandboxException, match="400: iam: there are no workload identities"):
        e2b.Sandbox.create(iam=iam)
    with pytest.raises(SandboxException, match="404: volume 'nosuch' does not exist"):
        e2b.Sandbox.create(volume_mounts={"/home/user/v": "nosuch"})
    with pytest.raises(SandboxException, match="404: template 'mcp-gateway' does not exist"):
        e2b.Sandbox.create(mcp={})


def test_volumes_are_mounted_by_name(e2b: E2B, place: RealServer, run: Run) -> None:
    name = f"data-{uuid.uuid4().hex[:8]}"
    with httpx.Client(base_url=place.url, timeout=30) as http:
        http.post("/v1/volumes", json={"name": name}).raise_for_status()
        with e2b.Sandbox.create(volume_mounts={"/home/user/deep/data": name}) as first:
            run(first.sandbox_id, "echo kept > /home/user/deep/data/file; ls -la /home/user/deep")
            assert first.get_info().volume_mounts == [
                {"name": name, "path": "/home/user/deep/data"}
            ]
        with e2b.Sandbox.create(volume_mounts={"/home/user/other": name}) as second:
            assert run(second.sandbox_id, "cat /home/user/other/file") == "kept\n"
        with pytest.raises(SandboxException, match="name a folder below /home/user"):
            e2b.Sandbox.create(volume_mounts={"/etc/data": name})
        http.delete(f"/v1/volumes/{name}").raise_for_status()


def counts_memory(place: RealServer, sandbox: Sandbox) -> bool:
    told = httpx.get(f"{place.url}/v1/sandboxes/{sandbox.sandbox_id}", timeout=30).json()
    return "memory" not in {each["what"] for each in told["unenforced"]}


def test_metrics_have_a_history(sandbox: Sandbox, place: RealServer, run: Run) -> None:
    run(sandbox.sandbox_id, "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
    first = sandbox.get_metrics()
    assert len(first) >= 1
    last = first[-1]
    assert last.cpu_count >= 1 and last.mem_total > 0 and last.disk_total > 0
    assert (last.mem_used or 0) <= last.mem_total
    assert last.mem_used or not counts_memory(place, sandbox)
    assert 0 <= last.cpu_used_pct <= 400
    assert abs(datetime.now(UTC) - last.timestamp) < timedelta(seconds=10)

    def more() -> bool:
        return len(sandbox.get_metrics()) > len(first)

    wait_for(more, what="a second sample")
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    assert sandbox.get_metrics(end=long_ago) == []
    assert len(sandbox.get_metrics(start=long_ago, end=datetime.now(UTC))) >= 2
    assert sandbox.get_metrics(start=datetime.now(UTC) + timedelta(hours=1)) == []


def test_metrics_of_several_come_at_once(shared: Sandbox, place: RealServer) -> None:
    ids = f"{shared.sandbox_id},{NOBODYS}"
    found = httpx.get(f"{place.url}/sandboxes/metrics", params={"sandbox_ids": ids}).json()
    assert set(found["sandboxes"]) == {shared.sandbox_id}
    assert found["sandboxes"][shared.sandbox_id]["memTotal"] > 0


def test_a_paused_one_has_the_metrics_it_had(sandbox: Sandbox) -> None:
    count = len(sandbox.get_metrics())
    sandbox.pause()
    assert count <= len(sandbox.get_metrics()) <= count + 1


def test_the_log_has_the_programs_that_ran(sandbox: Sandbox, place: RealServer) -> None:
    sandbox.commands.run("echo first")
    with pytest.raises(CommandExitException):
        sandbox.commands.run("exit 3")

    def ask(path: str, **query: str) -> Any:
        answer = httpx.get(place.url + path, params=query)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        for each in (*found["logs"], *found.get("logEntries", ())):
            assert abs(datetime.now(UTC) - datetime.fromisoformat(each.pop("timestamp"))) < HOUR
        return found

    path = f"/sandboxes/{sandbox.sandbox_id}/logs"
    logs = ask("/v2" + path)["logs"]
    told = [(each["message"], each["level"]) for each in logs]
    assert told[:2] == [("Process started", "info"), ("Process ended", "info")]
    assert told[-1] == ("Process ended", "error")
    assert "echo first" in logs[0]["fields"]["cmd"] and logs[-1]["fields"]["exit_code"] == "3"
    (failed,) = ask("/v2" + path, level="error", search="exit 3")["logs"]
    assert failed == logs[-1]
    assert ask("/v2" + path, direction="backward", limit="1")["logs"] == logs[-1:]
    later = str(int(time.time() * 1000) + 60_000)
    assert ask("/v2" + path, cursor=later)["logs"] == []
    older = ask(path)
    assert older["logEntries"] == logs
    moments = [httpx.get(f"{place.url}/v2{path}").json()["logs"] for _ in range(5)]
    assert all(each == moments[0] for each in moments)  # their timestamps, too
    assert json.loads(older["logs"][-1]["line"])["exit_code"] == "3"
    sandbox.pause()
    assert ask("/v2" + path)["logs"] == []
    sandbox.connect()


async def test_the_async_sdk_does_the_same(async_sandbox: AsyncSandbox, e2b: E2B, run: Run) -> None:
    id = async_sandbox.sandbox_id
    await asyncio.to_thread(run, id, "echo kept > file")
    made = await async_sandbox.create_snapshot()
    assert len(await async_sandbox.get_metrics()) >= 1
    forks = await async_sandbox.fork(timeout=60)
    assert isinstance(forks[0], AsyncSandbox) and await forks[0].kill()
    assert await async_sandbox.pause() is True
    await async_sandbox.connect()
    await async_sandbox.update_network({"deny_out": ["0.0.0.0/0"]})
    found = await e2b.AsyncSandbox.list_snapshots(id).next_items()
    assert [each.snapshot_id for each in found] == [made.snapshot_id]
    assert await e2b.AsyncSandbox.delete_snapshot(made.snapshot_id)


def test_the_older_paths_do_the_same(place: RealServer) -> None:
    with httpx.Client(base_url=place.url, timeout=30) as http:
        body = {"templateID": "base", "secure": True, "allow_internet_access": True, "timeout": 60}
        made = http.post("/sandboxes", json=body)
        assert made.status_code == 201, made.text
        id = made.json()["sandboxID"]
        assert id in {each["sandboxID"] for each in http.get("/sandboxes").json()}
        assert http.post(f"/sandboxes/{id}/connect", json={"timeout": 60}).status_code == 200
        assert http.post(f"/sandboxes/{id}/refreshes", json={"duration": 90}).status_code == 204
        assert http.post(f"/sandboxes/{id}/resume", json={}).status_code == 409
        assert http.post(f"/sandboxes/{id}/pause", json={}).status_code == 204
        assert id not in {each["sandboxID"] for each in http.get("/sandboxes").json()}
        assert http.post(f"/sandboxes/{id}/resume", json={"timeout": 60}).status_code == 201
        assert http.post(f"/sandboxes/{id}/pause", json={}).status_code == 204
        assert http.post(f"/sandboxes/{id}/connect", json={}).status_code == 201
        assert http.get(f"/sandboxes/{id}/logs").json() == {"logs": [], "logEntries": []}
        assert http.get(f"/v2/sandboxes/{id}/logs").json() == {"logs": []}
        assert http.delete(f"/sandboxes/{id}").status_code == 204


def test_nobodys_is_not_found(e2b: E2B) -> None:
    for call in (
        lambda: e2b.Sandbox.pause(NOBODYS),
        lambda: e2b.Sandbox.create_snapshot(NOBODYS),
        lambda: e2b.Sandbox.fork(NOBODYS),
        lambda: e2b.Sandbox.get_metrics(NOBODYS),
        lambda: e2b.Sandbox.update_network(NOBODYS, {}),
    ):
        with pytest.raises(SandboxNotFoundException):
            call()
