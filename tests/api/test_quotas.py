"""Quotas with real sandboxes: CPU time, storage, and who may set and see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from capsule_sdk import CapacityError, CapsuleClient, ForbiddenError
from tests.support import wait_for
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

ADMIN = "operator-key-of-the-tests"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server(agent_binary: object) -> Iterator[RealServer]:
    with real_server(API_KEYS=ADMIN, TENANT_SANDBOXES="5") as running:
        yield running


@pytest.fixture(scope="module")
def admin(server: RealServer) -> Iterator[CapsuleClient]:
    with CapsuleClient(server.url, api_key=ADMIN, retries=0) as client:
        yield client


def tenant(server: RealServer, admin: CapsuleClient, name: str) -> CapsuleClient:
    key = admin.keys.create(tenant=name).key
    return CapsuleClient(server.url, api_key=key, retries=0)


def test_quotas_are_set_and_seen(server: RealServer, admin: CapsuleClient) -> None:
    with tenant(server, admin, "seen") as client, client.create("bash", memory=64 * MIB):
        own = client.tenants.get()
        assert own.tenant == "seen" and own.quota["sandboxes"] == 5
        assert own.used["sandboxes"] == 1 and own.used["memory"] == 64 * MIB
        assert admin.tenants.set("seen", sandboxes=1, memory=128 * MIB).quota["sandboxes"] == 1
        assert client.tenants.get("seen").quota["memory"] == 128 * MIB
        with pytest.raises(CapacityError, match="has 1 sandboxes, its quota is 1") as full:
            client.create("bash")
        assert full.value.details["limit"] == 1
        assert admin.tenants.set("seen", reset=True).quota["sandboxes"] == 5
        listed = {each.tenant: each for each in admin.tenants.list()}
        assert listed["seen"].used["sandboxes"] == 1 and "default" in listed
        for refused in (client.tenants.list, lambda: client.tenants.get("default")):
            with pytest.raises(ForbiddenError, match="scope admin"):
                refused()
        with pytest.raises(ForbiddenError, match="scope admin"):
            client.tenants.set("seen", sandboxes=100)


def test_quotas_over_rest_and_json_rpc(server: RealServer) -> None:
    headers = {"X-API-Key": ADMIN, "X-Capsule-Tenant": "patient"}

    def rpc(method: str, **params: object) -> Any:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return http.post("/rpc", json=call).json()["result"]

    with httpx.Client(verify=False, base_url=server.url, headers=headers) as http:
        made = http.post("/v1/sandboxes", json={"template": "bash"}).json()
        assert (
            http.patch("/v1/tenants/patient", json={"sandboxes": 1}).json()["quota"]["sandboxes"]
            == 1
        )
        assert http.patch("/v1/tenants/a%20b", json={}).status_code == 400
        assert rpc("tenant.v1.set", tenant="patient", execs=3) == rpc(
            "tenant.v1.get", tenant="patient"
        )
        about = http.get("/v1/tenants/patient").json()
        assert (about["used"]["sandboxes"], about["quota"]["execs"]) == (1, 3)
        assert about in http.get("/v1/tenants").json()["tenants"]
        assert about in rpc("tenant.v1.list")["tenants"]
        refused = http.post("/v1/sandboxes", json={"template": "bash"})
        http.delete(f"/v1/sandboxes/{made['id']}")
    assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    details = refused.json()["error"]["details"]
    assert (details["quota"], details["used"], details["limit"]) == ("sandboxes", 1, 1)


def test_cpu_time_is_measured(server: RealServer, admin: CapsuleClient) -> None:
    """Of execs at their end, and of what an interpreter does meanwhile."""
    admin.tenants.set("busy", cpu_seconds=0.3)
    with tenant(server, admin, "busy") as client, client.create("python") as capsule:
        assert capsule.exec("echo").exit_code == 0
        burn = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
        context = capsule.context("python")
        assert context.run(burn).status == "ok"

        def refused() -> bool:
            try:
                capsule.exec("true")
                return False
            except CapacityError as error:
                return str(error.details["quota"]) == "cpu_seconds"

        wait_for(refused, what="what the interpreter used is counted", within=15)
        assert (client.tenants.get().used["cpu_seconds"] or 0) >= 0.3
        admin.tenants.set("busy", cpu_seconds=1000)
        assert capsule.exec("true").exit_code == 0


def test_storage_is_counted(server: RealServer, admin: CapsuleClient) -> None:
    admin.tenants.set("full", storage=3 * MIB)
    with tenant(server, admin, "full") as client, client.create("bash") as capsule:
        capsule.exec("head -c 2000000 /dev/urandom > a")
        capsule.snapshot("first")
        assert (client.tenants.get().used["storage"] or 0) >= 2_000_000
        capsule.exec("head -c 2000000 /dev/urandom > b")
        with pytest.raises(ForbiddenError, match="volumes and files of sessions") as over:
            capsule.snapshot("second")
        assert over.value.details["limit"] == 3 * MIB
        assert [each.name for each in client.snapshots.list()] == ["first"]
        with pytest.raises(ForbiddenError, match="without a size"):
            client.volumes.create("data")
        client.snapshots.delete("first")
        assert client.tenants.get().used["storage"] == 0
        capsule.exec("rm b")
        capsule.snapshot("third")
        client.snapshots.delete("third")
