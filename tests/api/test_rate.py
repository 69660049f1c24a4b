"""How often an address may ask the playground, over HTTP."""

from __future__ import annotations

import httpx
import pytest

from capsule.edge.rate import Rate
from capsule.errors import InvalidError
from tests.api.double import serving

ASK = "/api/playground/container"  # without a session: a 400, which counts


async def test_an_address_that_asks_too_often_is_told_when_to_come_back() -> None:
    async with serving(playground_rate="3/minute") as running:
        async with httpx.AsyncClient(base_url=running.url) as http:
            answers = [await http.get(ASK) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [400, 400, 400, 429]
            assert [a.headers.get("ratelimit-remaining") for a in answers[:3]] == ["2", "1", "0"]
            assert answers[0].headers["ratelimit-limit"] == "3"
            assert 0 < int(answers[0].headers["ratelimit-reset"]) <= 60
            error = answers[3].json()["error"]
            assert error["code"] == "capacity"
            assert error["message"] == "too many requests from 127.0.0.1: limit 3 per 1 minute"
            assert "CAPSULE_PLAYGROUND_RATE" in error["hint"]
            assert 0 < int(answers[3].headers["retry-after"]) <= 60
            assert (await http.get("/health")).status_code == 200


async def test_addresses_are_counted_apart() -> None:
    rate = Rate("playground_rate", "1000/second")
    for _ in range(50):
        assert await rate.count("a")
    assert (await rate.count("b"))["RateLimit-Remaining"] == "999"


async def test_off_counts_nothing() -> None:
    assert await Rate("playground_rate", "off").count("a") == {}


def test_what_is_no_rate_is_named() -> None:
    with pytest.raises(InvalidError, match=r"^setting playground_rate: 'often' is no rate"):
        Rate("playground_rate", "often")
