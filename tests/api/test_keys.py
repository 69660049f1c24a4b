"""Keys over REST, JSON-RPC and `capsule key`, and tokens, on a real server."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import httpx
import jwt
import pytest

from capsule_sdk import CapsuleClient, ForbiddenError
from tests.support import wait_for
from tests.support.servers import CAPSULE, RealServer, real_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

ADMIN = "operator-key-of-the-tests"
SECRET = "a-secret-of-thirty-two-characters-or-more"


@pytest.fixture(scope="module")
def guarded(agent_binary: object) -> Iterator[RealServer]:
    """A server that asks for keys, and takes tokens."""
    with real_server(API_KEYS=ADMIN, JWT_SECRET=SECRET) as server:
        yield server


def command(server: RealServer, *args: str) -> str:
    """`capsule key …` on the server's own data directory."""
    done = subprocess.run(
        [*CAPSULE, "key", *args], env=server.env, capture_output=True, text=True, timeout=40
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(server: RealServer, key: str, path: str = "/v1/sandboxes") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=15).status_code


def test_a_key_from_create_to_revoke(guarded: RealServer) -> None:
    admin = {"X-API-Key": ADMIN}
    with httpx.Client(verify=False, base_url=guarded.url, headers=admin, timeout=15) as http:
        body = {"tenant": "rest", "scopes": ["read"], "name": "for a dashboard", "ttl_ms": 60_000}
        made = http.post("/v1/keys", json=body)
        assert made.status_code == 201
        key = made.json()
        assert key["key"].startswith(f"cap_{key['id']}_")
        assert (key["tenant"], key["scopes"], key["state"]) == ("rest", ["read"], "active")
        (listed,) = http.get("/v1/keys", params={"tenant": "rest"}).json()["keys"]
        assert "key" not in listed and "digest" not in listed
        assert listed == {name: value for name, value in key.items() if name != "key"}
        assert status(guarded, key["key"]) == 200
        for path in ("/metrics", "/v1/pool"):
            assert (status(guarded, key["key"], path), status(guarded, ADMIN, path)) == (403, 200)
        assert http.get("/v1/keys", params={"tenant": "rest"}).json()["keys"][0]["used_at"]
        revoked = http.delete(f"/v1/keys/{key['id']}").json()
        assert revoked["state"] == "revoked" and revoked["revoked_at"]
        assert status(guarded, key["key"]) == 401
        assert http.delete("/v1/keys/nosuch").status_code == 404
        assert http.post("/v1/keys", json={"scopes": ["fly"]}).status_code == 400


def test_the_command_on_the_data_directory_of_a_running_server(guarded: RealServer) -> None:
    key = command(guarded, "create", "--tenant", "cli", "--expires", "1h").strip()
    wait_for(lambda: status(guarded, key) == 200, what="the server takes the key")
    (listed,) = json.loads(command(guarded, "list", "--tenant", "cli", "--json"))["keys"]
    assert listed["state"] == "active" and key not in json.dumps(listed)
    command(guarded, "revoke", listed["id"], "--url", guarded.url, "--api-key", ADMIN)
    assert status(guarded, key) == 401


def test_a_token_is_as_good_as_a_key(guarded: RealServer) -> None:
    claims = {"tenant": "jot", "scope": "run", "exp": time.time() + 60, "sub": "ann"}
    token = jwt.encode(claims, SECRET, algorithm="HS256")
    with CapsuleClient(guarded.url, api_key=token) as client:
        with client.create("bash") as capsule:
            assert capsule.info.tenant == "jot"
            assert capsule.exec("echo hi").stdout == "hi\n"
        with pytest.raises(ForbiddenError):
            client.pool()
    assert status(guarded, token + "x") == 401
    assert status(guarded, jwt.encode({**claims, "exp": 1}, SECRET, algorithm="HS256")) == 401


def test_the_first_key_closes_a_server_and_revoking_it_does_not_open_it(
    agent_binary: object,
) -> None:
    with real_server() as server:
        assert status(server, "") == status(server, "whatever") == 200
        key = command(server, "create", "--scope", "admin").strip()
        wait_for(lambda: status(server, "") == 401, what="a key is asked for")
        assert (status(server, key), status(server, "whatever")) == (200, 401)
        with CapsuleClient(server.url, api_key=key) as client:
            client.keys.revoke(client.keys.list()[0].id)
        assert status(server, "") == status(server, key) == 401
