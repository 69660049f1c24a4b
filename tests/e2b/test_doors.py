"""Which requests are for a sandbox, and that only its own token opens it."""

from __future__ import annotations

import base64
import hashlib

import pytest

from capsule.edge.e2b.access import Access
from capsule.edge.e2b.doors import Door, door_of
from tests.api.client import Api

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "localhost:8080"}, None),
        ({"host": "localhost", "e2b-sandbox-id": "abc"}, None),
        ({"host": "x", "e2b-sandbox-id": "abc", "e2b-sandbox-port": "49983"}, Door("abc", 49983)),
        ({"host": "x", "e2b-sandbox-port": "49983"}, None),
        ({"host": "3000-abc.localhost:8080"}, Door("abc", 3000, by_name=True)),
        ({"host": "3000-ABC.localhost"}, Door("abc", 3000, by_name=True)),
        ({"host": "a3000-abc.localhost"}, None),
        ({"host": "3000-abc"}, None),
        ({"host": "03000-abc.localhost"}, None),
    ],
)
def test_the_door_is_in_the_headers_or_the_host(
    headers: dict[str, str], expected: Door | None
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert door_of({"type": "http", "headers": raw}) == expected


def door(id: str) -> dict[str, str]:
    return {"e2b-sandbox-id": id, "e2b-sandbox-port": "49983"}


async def test_health_is_that_of_the_server_or_of_the_sandbox(api: Api, box: str) -> None:
    assert (await api.http.get("/health")).status_code == 200
    assert (await api.http.get("/health", headers=door(box))).status_code == 204
    await api.rpc("delete", id=box)
    for id in (box, "unknown"):
        gone = await api.http.get("/health", headers=door(id))
        assert gone.status_code == 502
        assert gone.json() == {"sandboxId": id, "message": "The sandbox was not found", "code": 502}


PAGE = {"origin": "https://a.page"}
SENT = "content-type,e2b-sandbox-id,e2b-sandbox-port,x-access-token,keepalive-ping-interval"
PREFLIGHT = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": SENT,
}


async def test_pages_of_any_site_may_use_a_sandbox_with_its_token(
    api: Api, box: str, access: Access
) -> None:
    may = await api.http.options("/process.Process/List", headers=PREFLIGHT)
    assert (may.status_code, may.headers["access-control-allow-origin"]) == (200, "*")
    allowed = may.headers["access-control-allow-headers"].replace(" ", "").split(",")
    assert set(SENT.split(",")) <= set(allowed)
    assert "POST" in may.headers["access-control-allow-methods"]
    token = {"x-access-token": access.token(box)}
    asked = {**door(box), **PAGE, **token}
    listed = await api.http.post("/process.Process/List", json={}, headers=asked)
    assert (listed.status_code, listed.headers["access-control-allow-origin"]) == (200, "*")
    refused = await api.http.post("/process.Process/List", json={}, headers={**door(box), **PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
    named = {**PREFLIGHT, "host": f"49999-{box}.localhost:{api.http.base_url.port}"}
    assert (await api.http.options("/execute", headers=named)).status_code == 200
    ran = {**asked, "e2b-sandbox-port": "49999"}
    code = {"code": "echo $((6 * 7))", "language": "bash"}
    answer = await api.http.post("/execute", json=code, headers=ran)
    assert "42" in answer.text and answer.headers["access-control-allow-origin"] == "*"
    assert (await api.http.get("/contexts", headers=ran)).status_code == 200
    without = {**door(box), **PAGE, "e2b-sandbox-port": "49999"}
    assert (await api.http.get("/contexts", headers=without)).status_code == 403


async def test_pages_of_other_sites_reach_signed_files(api: Api, box: str, access: Access) -> None:
    query = signature(access.token(box), "/tmp/page", "write")
    sent = await api.http.post("/files", params=query, files={"file": b"from a page"}, headers=PAGE)
    assert (sent.status_code, sent.headers["access-control-allow-origin"]) == (200, "*")
    query = signature(access.token(box), "/tmp/page", "read")
    found = await api.http.get("/files", params=query, headers=PAGE)
    assert (found.text, found.headers["access-control-allow-origin"]) == ("from a page", "*")


async def test_pages_of_other_sites_reach_nothing_else(api: Api, box: str) -> None:
    """Neither our own API, however they ask, nor a program's port by headers."""
    bare = {**PAGE, "access-control-request-method": "POST"}
    assert (await api.http.options("/v1/sandboxes", headers=bare)).status_code == 403
    for path in ("/v1/sandboxes", "/v2/sandboxes"):
        answer = await api.http.get(path, headers=PAGE)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    program = {**door(box), **PAGE, "e2b-sandbox-port": "3000"}
    assert (await api.http.get("/", headers=program)).status_code == 403


def signature(token: str, path: str, operation: str) -> dict[str, str]:
    digest = hashlib.sha256(f"{path}:{operation}::{token}".encode()).digest()
    return {"path": path, "signature": "v1_" + base64.b64encode(digest).decode().rstrip("=")}
