"""Errors of E2B's API have the shape that its SDKs read, whichever part of the server answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from e2b import E2B, AuthenticationException, RateLimitException, ServiceBusyException

from tests.e2b.conftest import parameters
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

KEY = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def strict(agent_binary: object) -> Iterator[RealServer]:
    """A server that asks for a key, and has room for one sandbox."""
    with real_server(API_KEYS=KEY, MAX_SANDBOXES="1", RATE_LIMIT_ADDRESS="300/minute") as server:
        yield server


@pytest.fixture
async def http(strict: RealServer) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"X-API-Key": KEY}
    async with httpx.AsyncClient(base_url=strict.url, headers=headers, timeout=15) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/sandboxes/unknown", 404),
        ("DELETE", "/sandboxes/unknown", 404),
        ("PUT", "/v2/sandboxes", 405),
        ("GET", "/v2/nothing", 404),
        ("POST", "/v2/sandboxes", 400),
        ("GET", "/v2/sandboxes?limit=0", 400),
        ("GET", "/v2/sandboxes?order=up", 400),
        ("GET", "/v2/sandboxes?state=asleep", 400),
        ("GET", "/v2/sandboxes?nextToken=!", 400),
    ],
)
async def test_every_error_has_the_same_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"code", "message"}
    assert body["code"] == status and body["message"]


@pytest.mark.parametrize("path", ["/etc", "/sandboxes/../../etc", "/v1/sandboxes/unknown", "/"])
async def test_an_sdk_is_answered_in_its_shape_anywhere(
    http: httpx.AsyncClient, strict: RealServer, path: str
) -> None:
    agent = {"user-agent": "e2b-python-sdk/2.63.0"}
    body = (await http.delete(strict.url + path, headers=agent)).json()
    assert set(body) == {"code", "message"} and body["code"] in (404, 405)
    assert set((await http.get("/v1/sandboxes/unknown")).json()) == {"error"}


async def test_another_host_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v2/sandboxes", headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert answer.json()["code"] == 403


def test_a_wrong_key_is_an_error_of_its_own(strict: RealServer) -> None:
    client = E2B(**parameters(strict, "wrong"))  # type: ignore[arg-type]
    with pytest.raises(AuthenticationException, match="unknown API key"):
        client.Sandbox.create()


def test_a_full_server_is_busy(strict: RealServer) -> None:
    client = E2B(**parameters(strict, KEY), retries=0)  # type: ignore[arg-type]
    with client.Sandbox.create():
        with pytest.raises(ServiceBusyException, match="all sandboxes are taken: 1, limit 1"):
            client.Sandbox.create()
        body, headers = {"templateID": "base"}, {"X-API-Key": KEY}
        full = httpx.post(f"{strict.url}/v2/sandboxes", json=body, headers=headers)
        assert (full.status_code, 1 <= int(full.headers["retry-after"]) <= 5) == (503, True)


def test_requests_for_a_sandbox_count_for_the_rate_limit(agent_binary: object) -> None:
    with real_server(RATE_LIMIT_ADDRESS="5/minute") as server:
        door = {"E2b-Sandbox-Id": "unknown", "E2b-Sandbox-Port": "49983"}
        answers = [httpx.get(f"{server.url}/health", headers=door) for _ in range(6)]
        assert [each.status_code for each in answers] == [502] * 5 + [429]
        assert answers[0].headers["ratelimit-remaining"] == "4"
        assert set(answers[-1].json()) == {"code", "message"}
        assert int(answers[-1].headers["retry-after"]) > 0
        client = E2B(**parameters(server), retries=0)  # type: ignore[arg-type]
        with pytest.raises(RateLimitException, match="too many requests from this address"):
            client.Sandbox.list().next_items()
        assert httpx.get(f"{server.url}/health").status_code == 200
