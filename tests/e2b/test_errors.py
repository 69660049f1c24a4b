"""What goes wrong at a path of E2B's API is told as its SDKs read it, whoever answers."""

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
    """One that asks for a key, and has room for one sandbox."""
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
        ("GET", "/sandboxes/nobody", 404),
        ("POST", "/v2/sandboxes/nobody/connect", 404),
        ("DELETE", "/sandboxes/nobody", 404),
        ("PUT", "/v2/sandboxes", 405),
        ("PATCH", "/sandboxes/nobody", 405),
        ("GET", "/v2/nothing", 404),
        ("GET", "/sandboxes/a/b/c", 404),
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


async def test_a_slash_too_many_does_no_harm(http: httpx.AsyncClient, strict: RealServer) -> None:
    assert (await http.get(f"{strict.url}//v2/sandboxes")).json() == []


async def test_our_own_paths_keep_theirs(http: httpx.AsyncClient) -> None:
    assert set((await http.get("/v1/sandboxes/nobody")).json()) == {"error"}


@pytest.mark.parametrize("path", ["/etc", "/sandboxes/../../etc", "/v1/sandboxes/nobody", "/"])
async def test_an_sdk_is_answered_in_its_shape_anywhere(
    http: httpx.AsyncClient, strict: RealServer, path: str
) -> None:
    agent = {"user-agent": "e2b-python-sdk/2.63.0"}
    body = (await http.delete(strict.url + path, headers=agent)).json()
    assert set(body) == {"code", "message"} and body["code"] in (404, 405)


def test_an_id_that_is_a_path_is_no_sandbox(strict: RealServer) -> None:
    client = E2B(**parameters(strict, KEY), retries=0)  # type: ignore[arg-type]
    assert client.Sandbox.kill("../../etc") is False


async def test_a_request_without_a_key_is_refused(strict: RealServer) -> None:
    async with httpx.AsyncClient(base_url=strict.url) as stranger:
        answer = await stranger.get("/v2/sandboxes")
    assert answer.status_code == 401
    assert set(answer.json()) == {"code", "message"}


async def test_another_host_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v2/sandboxes", headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert answer.json()["code"] == 403


def test_the_sdk_tells_a_wrong_key(strict: RealServer) -> None:
    client = E2B(**parameters(strict, "wrong"))  # type: ignore[arg-type]
    with pytest.raises(AuthenticationException, match="unknown API key"):
        client.Sandbox.create()


def test_a_full_server_is_busy(strict: RealServer) -> None:
    client = E2B(**parameters(strict, KEY), retries=0)  # type: ignore[arg-type]
    with client.Sandbox.create():
        with pytest.raises(ServiceBusyException, match="all sandboxes are taken: 1, limit 1"):
            client.Sandbox.create()


async def test_a_full_server_says_when_to_try_again(
    http: httpx.AsyncClient, strict: RealServer
) -> None:
    body = {"templateID": "base"}
    made = (await http.post("/v2/sandboxes", json=body)).json()
    full = await http.post("/v2/sandboxes", json=body)
    await http.delete(f"/sandboxes/{made['sandboxID']}")
    assert full.status_code == 503
    assert 1 <= int(full.headers["retry-after"]) <= 5


def test_who_asks_too_often_is_told_so(agent_binary: object) -> None:
    with real_server(RATE_LIMIT_ADDRESS="3/minute") as server:
        client = E2B(**parameters(server), retries=0)  # type: ignore[arg-type]
        with pytest.raises(RateLimitException, match="too many requests from this address"):
            for _ in range(5):
                client.Sandbox.list().next_items()


def test_what_is_for_a_sandbox_counts_as_well(agent_binary: object) -> None:
    with real_server(RATE_LIMIT_ADDRESS="5/minute") as server:
        door = {"E2b-Sandbox-Id": "nobody", "E2b-Sandbox-Port": "49983"}
        answers = [httpx.get(f"{server.url}/health", headers=door) for _ in range(6)]
        assert [each.status_code for each in answers] == [502] * 5 + [429]
        assert answers[0].headers["ratelimit-remaining"] == "4"
        assert set(answers[-1].json()) == {"code", "message"}
        assert int(answers[-1].headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/health").status_code == 200
