"""`/metrics`: what Prometheus reads, and who may."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import eventually
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

KEY = "correct-horse-battery-staple"


async def read(server: RealServer, **headers: str) -> dict[tuple[str, ...], float]:
    async with httpx.AsyncClient(verify=False, base_url=server.url) as http:
        answer = await http.get("/metrics", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_it_tells_what_goes_on() -> None:
    with real_server(POOL_MIN="1", POOL_TEMPLATES="bash") as server:
        shelf = ("local", "", "bash")  # labels are sorted by name

        async def ready() -> bool:
            return (await read(server)).get(("capsule_pool_ready", *shelf)) == 1

        await eventually(ready, what="a box is ready")
        async with httpx.AsyncClient(verify=False, base_url=server.url) as http:
            made = (await http.post("/v1/sandboxes", json={"template": "bash"})).json()
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
        assert seen["capsule_pool_memory_bytes",] > 0
        assert seen["capsule_process_resident_memory_bytes",] > 0


@pytest.mark.parametrize(
    ("whom", "without", "with_key"),
    [("keys", 401, 200), ("anyone", 200, 200), ("nobody", 401, 404)],
)
async def test_the_setting_says_who_may_read_it(whom: str, without: int, with_key: int) -> None:
    with real_server(API_KEYS=KEY, METRICS=whom) as server:
        async with httpx.AsyncClient(verify=False, base_url=server.url) as http:
            assert (await http.get("/metrics")).status_code == without
            headers = {"X-API-Key": KEY}
            assert (await http.get("/metrics", headers=headers)).status_code == with_key
