"""The audit log over the API: what keys did to a real sandbox, by every surface."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from capsule.audit.trail import FILE, verify_file
from tests.support import eventually
from tests.support.servers import real_server

pytestmark = pytest.mark.real

ADMIN = "correct-horse-battery-staple"


async def test_it_has_who_did_what_to_which_sandbox() -> None:
    with real_server(API_KEYS=ADMIN) as server:

        def client(**headers: str) -> httpx.AsyncClient:
            return httpx.AsyncClient(verify=False, base_url=server.url, timeout=30, headers=headers)

        async with client(**{"X-API-Key": ADMIN}) as admin:

            async def called(http: httpx.AsyncClient, method: str, **params: Any) -> Any:
                call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                return (await http.post("/rpc", json=call)).json()["result"]

            made = await called(admin, "key.v1.create", tenant="acme", scopes=["run"])
            mine = {"X-API-Key": made["key"], "X-Request-Id": "my-request"}
            async with client(**mine) as http:
                body = {"template": "bash"}
                box = (await http.post("/v1/sandboxes", json=body)).json()["id"]
                await called(http, "sandbox.v1.exec", id=box, cmd=["sh", "-c", "echo password"])
                await http.get(f"/v1/sandboxes/{box}")  # only a look: not in the log
                assert (await http.post("/v1/keys", json={})).status_code == 403
                await http.delete(f"/v1/sandboxes/{box}")
                assert (await http.get("/v1/audit")).status_code == 403
            for look in ("pool.v1.status", "tenant.v1.list", "audit.v1.list", "key.v1.list"):
                await called(admin, look)
            await called(admin, "key.v1.revoke", key_id=made["id"])

            async def entries() -> list[dict[str, Any]]:
                answer = await admin.get("/v1/audit", params={"sandbox": box})
                found: list[dict[str, Any]] = answer.json()["entries"]
                return found if len(found) >= 5 else []

            about = await eventually(entries, what="written")
            assert {each["what"] for each in about} == {
                *("sandbox.created", "exec.finished", "sandbox.v1.exec"),
                *("sandbox.deleted", "DELETE /v1/sandboxes/{id}"),
            }
            assert {each["actor"] for each in about} == {made["id"]}
            assert {each["tenant"] for each in about} == {"acme"}
            assert {each["request"] for each in about} == {"my-request"}
            assert "password" not in str(about)

            async def everything() -> list[tuple[str, Any]]:
                found = (await called(admin, "audit.v1.list"))["entries"]
                names = [(each["what"], each.get("status")) for each in found]
                return names if names[0][0] == "key.v1.revoke" else []

            asked = await eventually(everything, what="the last one is written")
            assert ("POST /v1/keys", 403) in asked
            looks = {"pool.v1.status", "tenant.v1.list", "audit.v1.list", "key.v1.list"}
            assert not looks & {what for what, _ in asked}
        assert verify_file(server.base / "data" / FILE).broken == ()
