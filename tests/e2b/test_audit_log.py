"""The audit log has what is done with a sandbox's token, under its tenant."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from e2b import Sandbox

from tests.e2b.conftest import parameters
from tests.support import wait_for
from tests.support.servers import real_server

pytestmark = pytest.mark.real

ADMIN = "correct-horse-battery-staple"


def test_changes_are_in_the_audit_log_and_reads_are_not() -> None:
    with real_server(API_KEYS=ADMIN) as server:
        key = {"x-api-key": ADMIN}
        sandbox = Sandbox.create(**parameters(server, ADMIN))  # type: ignore[arg-type]
        id = sandbox.sandbox_id

        def entries(count: int, word: str) -> list[dict[str, Any]]:
            def found() -> list[dict[str, Any]]:
                query = {"sandbox": id}
                answer = httpx.get(f"{server.url}/v1/audit", params=query, headers=key).json()
                with_word = [e for e in answer["entries"] if word in str(e)]
                return with_word if len(with_word) >= count else []

            return wait_for(found, what="the entries")

        sandbox.commands.run("true")
        sandbox.files.write("a", "b")
        sandbox.files.list("/")
        by_token = entries(3, "'sandbox-token'")
        assert sorted(e["what"] for e in by_token) == ["POST envd", "POST envd", "exec.finished"]
        assert {entry["tenant"] for entry in by_token} == {"default"}

        # The SDK sends no token with contexts: while its ports are public, all may use them.
        door = {"e2b-sandbox-id": id, "e2b-sandbox-port": "49999"}
        token = {"x-access-token": sandbox._envd_access_token or ""}
        with httpx.Client(base_url=server.url, headers=door, timeout=15) as http:
            made = http.post("/contexts", json={}).json()["id"]
            http.get("/contexts", headers=key)
            http.post(f"/contexts/{made}/restart", headers=key).raise_for_status()
            http.delete(f"/contexts/{made}", headers=token).raise_for_status()
        assert [(each["what"], each["actor"]) for each in entries(3, "interpreter")] == [
            ("DELETE interpreter", "sandbox-token"),
            ("POST interpreter", "static"),
            ("POST interpreter", "sandbox-port"),
        ]
        sandbox.kill()
