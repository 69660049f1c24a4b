"""What is done with a sandbox's token is in the trail, under its tenant."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from e2b import Sandbox

from tests.support import eventually
from tests.support.servers import real_server

pytestmark = pytest.mark.real

ADMIN = "correct-horse-battery-staple"


async def test_commands_and_files_are_in_the_trail_and_looks_are_not() -> None:
    with real_server(API_KEYS=ADMIN) as server:
        way = {"api_key": ADMIN, "api_url": server.url, "sandbox_url": server.url}
        sandbox = Sandbox.create(**way)  # type: ignore[arg-type]  # the SDK's own words
        sandbox.commands.run("true")
        sandbox.files.write("a", "b")
        sandbox.files.list("/")
        async with httpx.AsyncClient(
            verify=False, base_url=server.url, headers={"X-API-Key": ADMIN}
        ) as admin:

            async def found() -> list[dict[str, Any]]:
                answer = await admin.get("/v1/audit", params={"sandbox": sandbox.sandbox_id})
                entries: list[dict[str, Any]] = answer.json()["entries"]
                return [each for each in entries if each["actor"] == "sandbox-token"]

            async def all_of_it() -> list[dict[str, Any]]:
                entries = await found()
                return entries if len(entries) >= 3 else []

            told = await eventually(all_of_it, what="written")
        assert sorted(each["what"] for each in told) == ["POST envd", "POST envd", "exec.finished"]
        assert {each["tenant"] for each in told} == {"default"}
        sandbox.kill()


async def test_contexts_are_in_the_trail_under_whoever_comes() -> None:
    """The SDK sends no token with these: with its ports open, they are for anybody."""
    with real_server(API_KEYS=ADMIN) as server:
        way = {"api_key": ADMIN, "api_url": server.url, "sandbox_url": server.url}
        sandbox = Sandbox.create(**way)  # type: ignore[arg-type]  # the SDK's own words
        door = {"e2b-sandbox-id": sandbox.sandbox_id, "e2b-sandbox-port": "49999"}
        key = {"x-api-key": ADMIN}
        token = {"x-access-token": sandbox._envd_access_token or ""}
        async with httpx.AsyncClient(base_url=server.url, headers=door, timeout=15) as http:
            made = (await http.post("/contexts", json={})).json()["id"]
            await http.get("/contexts", headers=key)
            (await http.post(f"/contexts/{made}/restart", headers=key)).raise_for_status()
            (await http.delete(f"/contexts/{made}", headers=token)).raise_for_status()
        query = {"sandbox": sandbox.sandbox_id}
        async with httpx.AsyncClient(base_url=server.url, headers=key) as admin:

            async def found() -> list[tuple[str, str]]:
                entries = (await admin.get("/v1/audit", params=query)).json()["entries"]
                told = [
                    (each["what"], each["actor"]) for each in entries if "interpreter" in str(each)
                ]
                return told if len(told) == 3 else []

            assert await eventually(found, what="written") == [
                ("DELETE interpreter", "sandbox-token"),
                ("POST interpreter", "static"),
                ("POST interpreter", "sandbox-port"),
            ]
        sandbox.kill()
