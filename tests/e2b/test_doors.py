"""Which requests are for a sandbox, and that only its own token opens it."""

from __future__ import annotations

import pytest

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


async def test_health_tells_a_running_sandbox_from_one_that_is_not(api: Api, box: str) -> None:
    assert (await api.http.get("/health")).status_code == 200
    assert (await api.http.get("/health", headers=door(box))).status_code == 204
    await api.rpc("delete", id=box)
    gone = await api.http.get("/health", headers=door(box))
    assert gone.status_code == 502
    assert gone.json() == {"sandboxId": box, "message": "The sandbox was not found", "code": 502}


async def test_an_unknown_sandbox_is_one_that_does_not_run(api: Api) -> None:
    assert (await api.http.get("/health", headers=door("nobody"))).status_code == 502
