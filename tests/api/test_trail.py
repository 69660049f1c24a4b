"""The trail over the API: what keys did to a real sandbox, by every surface."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from capsule.audit.trail import FILE, verify_file
from tests.support import eventually
from tests.support.servers import real_server

pytestmark = pytest.mark.real

ADMIN = "correct-horse-battery-staple"


async def test_it_says_which_key_did_what_to_which_sandbox() -> None:
    with real_server(API_KEYS=ADMIN) as server:

        def client(**headers: str) -> httpx.AsyncClient:
            return httpx.AsyncClient(verify=False, base_url=server.url, timeout=30, headers=headers)

        async with client(**{"X-API-Key": ADMIN}) as admin:
            made = (await admin.post("/v1/keys", json={"tenant": "acme", "scopes": ["run"]})).json()
            mine = {"X-API-Key": made["key"], "X-Request-Id": "my-request"}
            async with client(**mine) as http:
                body = {"template": "bash"}
                box = (await http.post("/v1/sandboxes", json=body)).json()["id"]
                params = {"id": box, "cmd": ["sh", "-c", "echo password"]}
                call = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.exec", "params": params}
                assert "result" in (await http.post("/rpc", json=call)).json()
                await http.get(f"/v1/sandboxes/{box}")  # who only looks leaves no trail
                assert (await http.post("/v1/keys", json={})).status_code == 403
                await http.delete(f"/v1/sandboxes/{box}")
                assert (await http.get("/v1/audit")).status_code == 403

            async def found() -> list[dict[str, Any]]:
                answer = await admin.get("/v1/audit", params={"sandbox": box})
                entries: list[dict[str, Any]] = answer.json()["entries"]
                return entries if len(entries) >= 5 else []

            told = await eventually(found, what="written")
            assert {each["what"] for each in told} == {
                *("sandbox.created", "exec.finished", "sandbox.v1.exec"),
                *("sandbox.deleted", "DELETE /v1/sandboxes/{id}"),
            }
            assert {each["actor"] for each in told} == {made["id"]}
            assert {each["tenant"] for each in told} == {"acme"}
            assert {each["request"] for each in told} == {"my-request"}
            assert "password" not in str(told)
            call = {"jsonrpc": "2.0", "id": 1, "method": "audit.v1.list"}
            asked = await admin.post("/rpc", json={**call, "params": {"tenant": "acme"}})
            everything = asked.json()["result"]["entries"]
            refused = [each for each in everything if each["what"] == "POST /v1/keys"]
            assert [each["status"] for each in refused] == [403]
        assert verify_file(server.base / "data" / FILE).broken == ()


async def test_an_admin_who_only_looks_leaves_no_trail() -> None:
    looks = ("pool.v1.status", "tenant.v1.list", "audit.v1.list", "key.v1.list")
    headers = {"X-API-Key": ADMIN}
    with real_server(API_KEYS=ADMIN) as server:
        async with httpx.AsyncClient(base_url=server.url, headers=headers) as admin:

            async def called(method: str, **params: Any) -> dict[str, Any]:
                call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                result: dict[str, Any] = (await admin.post("/rpc", json=call)).json()["result"]
                return result

            for method in looks:
                await called(method)
            made = await called("key.v1.create", tenant="acme", scopes=["run"])
            await called("key.v1.revoke", key_id=made["id"])

            async def found() -> list[str]:
                entries = (await called("audit.v1.list"))["entries"]
                return [each["what"] for each in entries] if len(entries) >= 2 else []

            assert await eventually(found, what="written") == ["key.v1.revoke", "key.v1.create"]
