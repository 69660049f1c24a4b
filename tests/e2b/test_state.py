"""Pause, resume, snapshots, forks, metrics and the network, through E2B's own SDK."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from e2b import (
    E2B,
    CommandExitException,
    Sandbox,
    SandboxException,
    SandboxState,
)

from tests.support import wait_for
from tests.support.servers import RealServer

pytestmark = pytest.mark.real

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


@pytest.mark.parametrize(
    ("pause", "resume", "mode", "programs"),
    [
        ({}, {}, "full", "1"),
        ({"keep_memory": False}, {}, "filesystem", "0"),
        ({}, {"on_resume": "reboot"}, "full", "0"),
    ],
)
def test_a_pause_keeps_programs_or_files_alone(
    sandbox: Sandbox,
    e2b: E2B,
    run: Run,
    place: RealServer,
    pause: Any,
    resume: Any,
    mode: str,
    programs: str,
) -> None:
    id = sandbox.sandbox_id
    start(place, id, "sleep 1000")
    run(id, "echo kept > file; until pgrep sleep; do :; done")
    assert [sandbox.pause(**pause) for _ in range(2)] == [True, False]
    assert not sandbox.is_running()
    assert detail(place, id)["pauseMode"] == mode
    again = e2b.Sandbox.connect(id, **resume)
    assert again.is_running()
    assert again._envd_access_token == sandbox._envd_access_token
    assert run(id, "cat file; pgrep -c sleep; true") == f"kept\n{programs}\n"
    assert "pauseMode" not in detail(place, id)


def detail(place: RealServer, id: str) -> dict[str, object]:
    found: dict[str, object] = httpx.get(f"{place.url}/sandboxes/{id}").json()
    return found


def test_the_timeout_stands_still_during_a_pause(e2b: E2B) -> None:
    sandbox = e2b.Sandbox.create(timeout=60)
    sandbox.pause()
    assert sandbox.get_info().end_at > datetime.now(UTC) + timedelta(days=1)
    sandbox.connect(timeout=100)
    left = sandbox.get_info().end_at - datetime.now(UTC)
    assert timedelta(seconds=80) < left <= timedelta(seconds=101)
    sandbox.kill()


@pytest.mark.parametrize("mode", ["full", "filesystem"])
def test_it_is_paused_at_its_timeout(e2b: E2B, mode: str, run: Run) -> None:
    lifecycle: Any = {"on_timeout": {"action": "pause", "mode": mode}}
    sandbox = e2b.Sandbox.create(lifecycle=lifecycle)
    run(sandbox.sandbox_id, "echo kept > file")
    assert sandbox.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": False}
    sandbox.set_timeout(0)
    wait_for(
        lambda: sandbox.get_info().state == SandboxState.PAUSED, what="it is paused", within=20
    )
    sandbox.connect()
    assert run(sandbox.sandbox_id, "cat file") == "kept\n"
    sandbox.kill()


def test_traffic_resumes_a_sandbox_with_auto_resume(e2b: E2B) -> None:
    sandbox = e2b.Sandbox.create(lifecycle={"on_timeout": "pause", "auto_resume": True})
    assert sandbox.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": True}
    sandbox.pause()
    assert sandbox.is_running()
    sandbox.kill()


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
    both, one = (
        {each.snapshot_id for each in e2b.Sandbox.list_snapshots(name=query).next_items()}
        for query in (name, f"{name}:v2")
    )
    assert (both, one) == ({made.snapshot_id, tagged.snapshot_id}, {tagged.snapshot_id})
    for each in (made, tagged):
        assert e2b.Sandbox.delete_snapshot(each.snapshot_id) is True
    with pytest.raises(SandboxException, match="409: python is a template already"):
        sandbox.create_snapshot(name="python")
    with pytest.raises(SandboxException, match="400: name: 'a b' is none"):
        sandbox.create_snapshot(name="a b")


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


def test_internet_access_is_refused(e2b: E2B) -> None:
    with pytest.raises(SandboxException, match="400: allow_internet_access: cannot be given"):
        e2b.Sandbox.create(allow_internet_access=True)
    network: Any = {"deny_out": ["8.8.8.8"], "allow_public_traffic": False}
    with e2b.Sandbox.create(allow_internet_access=False, network=network) as made:
        info = made.get_info()
        assert info.allow_internet_access is False
        assert info.network == network
        assert made.traffic_access_token
        made.update_network({"deny_out": ["0.0.0.0/0"]})
        assert made.get_info().network["deny_out"] == ["0.0.0.0/0"]
        again = e2b.Sandbox.connect(made.sandbox_id)
        assert again.traffic_access_token == made.traffic_access_token
    with e2b.Sandbox.create() as public:
        assert public.traffic_access_token is None and public.get_info().network is None


def test_missing_features_volumes_and_templates_are_named(e2b: E2B) -> None:
    iam: Any = {"tokens": {"aws": {"audience": "a", "token_type": "JWT-SVID"}}}
    with pytest.raises(SandboxException, match="400: iam: there are no workload identities"):
        e2b.Sandbox.create(iam=iam)
    with pytest.raises(SandboxException, match="404: volume 'nosuch' does not exist"):
        e2b.Sandbox.create(volume_mounts={"/home/user/v": "nosuch"})
    with pytest.raises(SandboxException, match="404: template 'mcp-gateway' does not exist"):
        e2b.Sandbox.create(mcp={})


def test_metrics_have_a_history(sandbox: Sandbox, run: Run, place: RealServer) -> None:
    run(sandbox.sandbox_id, "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
    first = sandbox.get_metrics()
    assert len(first) >= 1
    last = first[-1]
    assert last.cpu_count >= 1 and last.mem_total > 0 and last.disk_total > 0
    about = httpx.get(f"{place.url}/v1/sandboxes/{sandbox.sandbox_id}").json()
    if "memory" not in [gap["what"] for gap in about["unenforced"]]:  # else it is not counted
        assert 0 < (last.mem_used or 0) <= last.mem_total
    assert 0 <= last.cpu_used_pct <= 400
    assert abs(datetime.now(UTC) - last.timestamp) < timedelta(seconds=60)

    def more() -> bool:
        return len(sandbox.get_metrics()) > len(first)

    wait_for(more, what="a second sample")
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    assert sandbox.get_metrics(end=long_ago) == []
    assert len(sandbox.get_metrics(start=long_ago, end=datetime.now(UTC))) >= 2
    assert sandbox.get_metrics(start=datetime.now(UTC) + timedelta(hours=1)) == []

    ids = f"{sandbox.sandbox_id},abcdefghijklmnop"
    several = httpx.get(f"{place.url}/sandboxes/metrics", params={"sandbox_ids": ids}).json()
    assert set(several["sandboxes"]) == {sandbox.sandbox_id}
    assert several["sandboxes"][sandbox.sandbox_id]["memTotal"] > 0
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
    lines = [(each["message"], each["level"]) for each in logs]
    assert lines[:2] == [("Process started", "info"), ("Process ended", "info")]
    assert lines[-1] == ("Process ended", "error")
    assert "echo first" in logs[0]["fields"]["cmd"] and logs[-1]["fields"]["exit_code"] == "3"
    assert ask("/v2" + path, level="error", search="exit 3")["logs"] == logs[-1:]
    assert ask("/v2" + path, direction="backward", limit="1")["logs"] == logs[-1:]
    older = ask(path)
    assert older["logEntries"] == logs
    assert json.loads(older["logs"][-1]["line"])["exit_code"] == "3"
    sandbox.pause()
    assert ask("/v2" + path)["logs"] == []


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
