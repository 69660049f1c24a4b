"""What an operator sees of a server: ids of requests, `/metrics`, and the log."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import eventually
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

KEY = "correct-horse-battery-staple"
Samples = dict[tuple[str, ...], float]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    settings = {"API_KEYS": KEY, "METRICS": "anyone", "METRICS_SANDBOXES": "1"}
    with real_server(LOG_REQUESTS="yes", LOG_LEVEL="info", LOG_FORMAT="json", **settings) as made:
        yield made


def client(server: RealServer, **headers: str) -> httpx.AsyncClient:
    keys = {"Authorization": f"Bearer {KEY}", **headers}
    return httpx.AsyncClient(verify=False, base_url=server.url, headers=keys, timeout=30)


async def read(server: RealServer) -> Samples:
    """Values by name and labels, these in the order of their names."""
    async with httpx.AsyncClient(verify=False, base_url=server.url) as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def logged(server: RealServer, **wanted: object) -> list[dict[str, object]]:
    lines = (server.base / "log").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [each for each in found if wanted.items() <= each.items()]


async def create(http: httpx.AsyncClient, **body: object) -> dict[str, object]:
    answer = await http.post("/v1/sandboxes", json={"template": "bash", **body})
    assert answer.status_code == 201, answer.text
    made: dict[str, object] = answer.json()
    return made


async def test_every_answer_has_an_id_and_a_client_may_choose_it(server: RealServer) -> None:
    async with client(server) as http:
        first = (await http.get("/health")).headers["x-request-id"]
        second = (await http.get("/v1/sandboxes")).headers["x-request-id"]
        assert first != second
        mine = await http.get("/v1/nowhere", headers={"X-Request-Id": "order-7:retry.1"})
        assert mine.headers["x-request-id"] == "order-7:retry.1"
        for bad in ("two words", "x" * 200, 'quote"', "ümlaut"):
            answer = await http.get("/health", headers={b"X-Request-Id": bad.encode()})
            assert answer.headers["x-request-id"] != bad
        refused = await http.get("/v1/sandboxes", headers={"Authorization": "Bearer wrong"})
        assert refused.status_code == 401
        assert refused.headers["x-request-id"]


async def test_metrics_show_sandboxes_execs_and_the_pool() -> None:
    with real_server(POOL_MIN="1", POOL_TEMPLATES="bash") as server:
        shelf = ("local", "", "bash")

        async def ready() -> Samples | None:
            seen = await read(server)
            return seen if seen.get(("capsule_pool_ready", *shelf)) == 1 else None

        seen = await eventually(ready, what="a box is ready")
        # Now: for a moment after a box was taken, the pool has none and launches none.
        assert seen is not None and seen["capsule_pool_memory_bytes",] > 0
        async with httpx.AsyncClient(verify=False, base_url=server.url) as http:
            made = await create(http)
            await http.post(f"/v1/sandboxes/{made['id']}/execs", json={"cmd": ["true"]})
        seen = await read(server)
        assert seen["capsule_sandboxes", "running"] == 1
        assert seen["capsule_tenant_sandboxes", "running", "default"] == 1
        assert seen["capsule_sandboxes_started_total", "warm"] == 1
        assert seen["capsule_execs_begun_total",] == 1
        assert seen["capsule_execs",] == 0
        assert seen[("capsule_pool_hits_total", *shelf)] == 1
        assert seen[("capsule_pool_misses_total", *shelf)] == 0
        assert seen["capsule_launch_queue",] == 0
        assert seen["capsule_process_resident_memory_bytes",] > 0


# `keys`, the default, is in test_keys.
@pytest.mark.parametrize(
    ("whom", "without", "with_key"), [("anyone", 200, 200), ("nobody", 401, 404)]
)
async def test_a_setting_decides_who_may_read_metrics(
    whom: str, without: int, with_key: int
) -> None:
    with real_server(API_KEYS=KEY, METRICS=whom) as server:
        async with client(server) as http:
            assert (await http.get("/metrics")).status_code == with_key
            anonymous = {"Authorization": ""}
            assert (await http.get("/metrics", headers=anonymous)).status_code == without


async def test_requests_are_counted_by_route_and_unknown_paths_are_one(server: RealServer) -> None:
    before = await read(server)
    async with client(server) as http:
        for name in ("one", "two", "three"):
            assert (await http.get(f"/v1/sandboxes/{name}")).status_code == 404
            assert (await http.get(f"/made/up/{name}")).status_code == 404
    after = await read(server)

    def more(*labels: str) -> float:
        key = ("capsule_http_requests_total", *labels)
        return after.get(key, 0) - before.get(key, 0)

    assert more("GET", "/v1/sandboxes/{id}", "404") == 3
    assert more("GET", "none", "404") == 3
    assert not any("/made/up" in label for key in after for label in key)
    bucket = ("capsule_http_request_seconds_bucket", "+Inf", "GET", "/v1/sandboxes/{id}")
    assert after[bucket] >= 3


async def test_ends_of_execs_are_counted_by_reason_also_without_a_reader(
    server: RealServer,
) -> None:
    before = await read(server)
    async with client(server) as http:
        id = (await create(http))["id"]
        path = f"/v1/sandboxes/{id}/execs"
        await http.post(path, json={"cmd": ["true"]})
        await http.post(path, json={"cmd": ["sleep", "20"], "timeout_ms": 100})
        body, accept = {"cmd": ["sleep", "0.5"]}, {"Accept": "text/event-stream"}
        async with http.stream("POST", path, json=body, headers=accept) as stream:
            assert stream.is_success

        async def counted() -> bool:
            now = await read(server)
            ended = "capsule_execs_ended_total"
            return {
                reason: now[ended, reason] - before[ended, reason]
                for reason in ("exited", "timed_out", "signaled")
            } == {"exited": 2, "timed_out": 1, "signaled": 0}

        await eventually(counted, what="all three were counted")
        await http.delete(f"/v1/sandboxes/{id}")
    after = await read(server)
    key = ("capsule_sandboxes_ended_total", "deleted")
    assert after[key] == before[key] + 1
    assert after["capsule_exec_seconds_count",] == before["capsule_exec_seconds_count",] + 3


async def test_the_use_of_sandboxes_is_shown_for_as_many_as_configured(server: RealServer) -> None:
    async with client(server) as http:
        made, second = await create(http), str((await create(http))["id"])
        first = str(made["id"])
        busy = "for ((i = 0; i < 100000; i++)); do :; done"
        await http.post(f"/v1/sandboxes/{first}/execs", json={"cmd": ["bash", "-c", busy]})
        seen = await read(server)
        assert seen["capsule_sandbox_cpu_seconds_total", first, "bash"] > 0
        if "'memory'" not in str(made["unenforced"]):  # without cgroups it is not counted
            assert seen["capsule_sandbox_memory_bytes", first, "bash"] > 0
        assert not any(second in key for key in seen)
        for id in (first, second):
            await http.delete(f"/v1/sandboxes/{id}")
    assert not any(first in key for key in await read(server))


async def test_reading_metrics_and_info_is_no_activity(server: RealServer) -> None:
    """The tenant is there while it runs, and in the log of its end."""
    async with client(server, **{"X-Capsule-Tenant": "blue"}) as http:
        id = (await create(http, idle_timeout_ms=1000))["id"]
        assert (await read(server))["capsule_tenant_sandboxes", "running", "blue"] == 1

        async def gone() -> bool:
            await read(server)
            return (await http.get(f"/v1/sandboxes/{id}")).status_code == 410

        await eventually(gone, what="it was idle", within=15)
    assert (await read(server))["capsule_sandboxes_ended_total", "expired"] >= 1
    await eventually(
        lambda: logged(server, event="sandbox.expired", sandbox=id, tenant="blue"), what="logged"
    )


async def test_the_log_has_request_sandbox_and_exec(server: RealServer) -> None:
    async with client(server, **{"X-Request-Id": "look-for-me"}) as http:
        id = (await create(http))["id"]
        done = await http.post(f"/v1/sandboxes/{id}/execs", json={"cmd": ["false"]})
        await http.delete(f"/v1/sandboxes/{id}")
    mine = logged(server, request="look-for-me")
    asked = [line for line in mine if line["event"] == "request"]
    assert [line["status"] for line in asked] == [201, 200, 200]
    assert (asked[1]["route"], asked[1]["sandbox"]) == ("/v1/sandboxes/{id}/execs", id)
    (ended,) = (line for line in mine if line["event"] == "exec.finished")
    assert (ended["sandbox"], ended["exec"], ended["code"]) == (id, done.json()["exec_id"], 1)
    assert {line["event"] for line in mine} >= {"sandbox.created", "sandbox.deleted"}
