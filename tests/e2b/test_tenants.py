"""Keys of tenants with E2B's SDK: a key that may only read, and public ports.

What else belongs to another tenant is in test_strangers.py and tests/api/test_tenants.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from e2b import E2B, Sandbox, SandboxException

from tests.e2b.conftest import parameters
from tests.support.servers import real_server

pytestmark = pytest.mark.real

ADMIN = "operator-key-of-the-tests"


class Tenants(NamedTuple):
    url: str
    blue: E2B
    red: E2B
    blue_key: str

    reader: E2B  # for blue, with a key that may only read
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
        blue, red, reader = (E2B(**parameters(server, each)) for each in keys)  # type: ignore[arg-type]
        yield Tenants(server.url, blue, red, keys[0], reader, blue.Sandbox.create(timeout=300))


def test_a_key_that_may_read_does_no_more(tenants: Tenants) -> None:
    reader, id = tenants.reader, tenants.box.sandbox_id
    assert [each.sandbox_id for each in reader.Sandbox.list().next_items()] == [id]
    assert len(reader.Sandbox.get_metrics(id)) >= 1
    for call in (
        lambda: reader.Sandbox.create(),
        lambda: reader.Sandbox.kill(id),
        lambda: reader.Sandbox.get_info(id),  # its answer has the sandbox's token
    ):
        with pytest.raises(SandboxException, match=r"403: .* needs a key with the scope run"):
            call()


def test_a_visitor_has_no_folders_made(tenants: Tenants) -> None:
    """Its ports are public, as at E2B, so contexts are open to all who know its name."""
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
