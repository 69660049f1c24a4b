"""What is one tenant's does not exist for another, through E2B's SDK as well; and keys that may
only look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from e2b import E2B, Sandbox, SandboxException, SandboxNotFoundException

from tests.e2b.conftest import parameters
from tests.support.servers import real_server

pytestmark = pytest.mark.real

ADMIN = "operator-key-of-the-tests"


class Tenants(NamedTuple):
    url: str
    blue: E2B
    red: E2B
    blue_key: str
    red_key: str
    looks: E2B  # for blue, with a key that may only look
    box: Sandbox  # blue's


@pytest.fixture(scope="module")
def tenants(agent_binary: object) -> Iterator[Tenants]:
    with real_server(API_KEYS=ADMIN) as server:
        headers = {"X-API-Key": ADMIN}

        def key(tenant: str, scope: str) -> str:
            body = {"tenant": tenant, "scopes": [scope]}
            made = httpx.post(f"{server.url}/v1/keys", headers=headers, json=body)
            found: str = made.json()["key"]
            return found

        keys = key("blue", "run"), key("red", "run"), key("blue", "read")
        blue, red, looks = (E2B(**parameters(server, each)) for each in keys)  # type: ignore[arg-type]
        yield Tenants(server.url, blue, red, *keys[:2], looks, blue.Sandbox.create(timeout=300))


def test_another_tenant_finds_nothing(tenants: Tenants) -> None:
    id, red = tenants.box.sandbox_id, tenants.red
    assert red.Sandbox.list().next_items() == []
    assert [each.sandbox_id for each in tenants.blue.Sandbox.list().next_items()] == [id]
    assert red.Sandbox.kill(id) is False
    for call in (red.Sandbox.connect, red.Sandbox.get_info, red.Sandbox.get_metrics):
        with pytest.raises(SandboxNotFoundException):
            call(id)
    for pause in (red.Sandbox.pause, red.Sandbox.fork, red.Sandbox.create_snapshot):
        with pytest.raises(SandboxNotFoundException):
            pause(id)
    many = httpx.get(
        f"{tenants.url}/sandboxes/metrics",
        params={"sandbox_ids": id},
        headers={"X-API-Key": tenants.red_key},
    )
    assert many.json() == {"sandboxes": {}}
    assert tenants.box.is_running()


def test_snapshots_are_their_tenants(tenants: Tenants) -> None:
    made = tenants.box.create_snapshot(name="blues")
    assert tenants.red.Sandbox.list_snapshots().next_items() == []
    with pytest.raises(SandboxException, match="404: template 'blues' does not exist"):
        tenants.red.Sandbox.create(made.snapshot_id)
    assert tenants.red.Sandbox.delete_snapshot(made.snapshot_id) is False
    assert tenants.blue.Sandbox.delete_snapshot(made.snapshot_id) is True


def test_a_key_that_may_look_does_no_more(tenants: Tenants) -> None:
    looks, id = tenants.looks, tenants.box.sandbox_id
    assert [each.sandbox_id for each in looks.Sandbox.list().next_items()] == [id]
    assert len(looks.Sandbox.get_metrics(id)) >= 1
    refused = "403: .* needs a key with the scope run"
    with pytest.raises(SandboxException, match=refused):
        looks.Sandbox.create()
    with pytest.raises(SandboxException, match=refused):
        looks.Sandbox.kill(id)
    with pytest.raises(SandboxException, match=refused):  # it has what opens the sandbox
        looks.Sandbox.get_info(id)


def test_the_token_of_one_opens_no_other(tenants: Tenants) -> None:
    other = tenants.red.Sandbox.create()
    headers = {
        "E2b-Sandbox-Id": tenants.box.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": other._envd_access_token or "",
    }
    url = f"{tenants.url}/process.Process/List"
    assert httpx.post(url, json={}, headers=headers).status_code == 401
    headers["X-Access-Token"] = tenants.box._envd_access_token or ""
    assert httpx.post(url, json={}, headers=headers).status_code == 200
    other.kill()


def test_a_visitor_has_no_folders_made(tenants: Tenants) -> None:
    """Its ports are public, as at E2B, so contexts are open to who knows its name."""
    box = tenants.box

    def create(folder: str, **shown: str) -> httpx.Response:
        headers = {"e2b-sandbox-id": box.sandbox_id, "e2b-sandbox-port": "49999", **shown}
        body = {"language": "bash", "cwd": folder}
        return httpx.post(f"{tenants.url}/contexts", json=body, headers=headers)

    refused = create("/tmp/visited")
    assert refused.status_code == 404 and "/tmp/visited" in refused.text
    assert not box.files.exists("/tmp/visited")
    assert create("/tmp").status_code == 200
    token = box._envd_access_token
    assert token and create("/tmp/held", **{"X-Access-Token": token}).status_code == 200
    assert create("/tmp/keyed", **{"X-API-Key": tenants.blue_key}).status_code == 200
    assert [box.files.exists(each) for each in ("/tmp/held", "/tmp/keyed")] == [True, True]
