"""Rate limits per key and per address, and the address that a request counts for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from capsule.config import Config
from capsule.edge.addresses import Addresses, group
from capsule.errors import InvalidError
from tests.api.double import Running, serving

KEY = "correct-horse-battery-staple"
OTHER = "another-key-of-sixteen"
CALL = {"jsonrpc": "2.0", "id": 1, "method": "template.v1.list"}


def asking(server: Running, key: str | None = KEY, **headers: str) -> httpx.AsyncClient:
    keyed = {"X-API-Key": key} if key else {}
    return httpx.AsyncClient(verify=False, base_url=server.url, headers={**keyed, **headers})


async def test_an_address_may_send_so_many_requests() -> None:
    async with serving(rate_limit_address="3/minute") as server, asking(server, None) as http:
        left = [(await http.get("/v1/templates")).headers["ratelimit-remaining"] for _ in range(3)]
        assert left == ["2", "1", "0"]
        refused = await http.get("/v1/templates")
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert error["code"] == "capacity" and "from this address" in error["message"]
        assert "3 per 1 minute" in error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["ratelimit-limit"] == "3"
        assert refused.headers["ratelimit-remaining"] == "0"
        assert 1 <= int(refused.headers["ratelimit-reset"]) <= 60
        assert (await http.get("/health")).status_code == 200  # for what watches the server
    async with serving() as server, asking(server, None) as http:
        assert "ratelimit-limit" not in (await http.get("/v1/templates")).headers, "not set"


async def test_every_surface_is_counted() -> None:
    async with serving(rate_limit_address="4/minute") as server, asking(server, None) as http:
        await http.get("/v1/templates")
        await http.post("/rpc", json=CALL)
        with pytest.raises(InvalidStatus) as unknown:
            await connect(f"ws://127.0.0.1:{server.port}/terminal/nosuch", proxy=None)
        assert unknown.value.response.status_code == 404
        assert unknown.value.response.headers["ratelimit-remaining"] == "1"
        await http.get("/nosuchpath")
        for answer in (await http.post("/rpc", json=CALL), await http.get("/docs")):
            assert answer.status_code == 429
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{server.port}/terminal/nosuch", proxy=None)
        assert refused.value.response.status_code == 429
        assert "retry-after" in refused.value.response.headers


async def test_a_key_may_send_so_many_requests_from_anywhere() -> None:
    settings: dict[str, Any] = {"api_keys": (KEY, OTHER), "rate_limit_key": "2/hour"}
    async with serving(**settings, trusted_proxies=("127.0.0.1",)) as server:
        for address in ("192.0.2.1", "192.0.2.2"):
            async with asking(server, **{"X-Forwarded-For": address}) as http:
                assert (await http.get("/v1/templates")).status_code == 200
        async with asking(server) as http:
            refused = await http.get("/v1/templates")
            assert refused.status_code == 429 and "with this key" in refused.text
            assert (await http.get("/docs")).status_code == 200


async def test_guesses_of_keys_are_limited() -> None:
    settings: dict[str, Any] = {"api_keys": (KEY,), "rate_limit_address": "2/minute"}
    async with serving(**settings) as server, asking(server, "wrong-key-of-sixteen") as http:
        found = [(await http.get("/v1/templates")).status_code for _ in range(3)]
    assert found == [401, 401, 429]


async def test_a_batch_counts_as_its_calls() -> None:
    async with serving(rate_limit_address="5/minute") as server, asking(server, None) as http:
        assert len((await http.post("/rpc", json=[CALL] * 3)).json()) == 3
        refused = (await http.post("/rpc", json=[CALL] * 3)).json()
        assert refused["error"]["data"]["code"] == "capacity"
        assert (await http.post("/rpc", json=[CALL])).status_code == 200


def request(peer: str, *forwarded: str) -> dict[str, Any]:
    headers = [(b"x-forwarded-for", each.encode()) for each in forwarded]
    return {"client": (peer, 1234) if peer else None, "headers": headers}


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("192.0.2.1", (), "192.0.2.1"),
        ("192.0.2.1", ("10.9.9.9",), "192.0.2.1"),  # not from a proxy: ignored
        ("10.0.0.1", ("198.51.100.7",), "198.51.100.7"),
        ("10.0.0.1", ("1.1.1.1, 198.51.100.7",), "198.51.100.7"),  # a client's own stand before
        ("10.0.0.1", ("1.1.1.1", "198.51.100.7, 10.0.0.2"), "198.51.100.7"),
        ("10.0.0.1", ("nonsense",), "10.0.0.1"),
        ("10.0.0.1", ("1.1.1.1, nonsense, 10.0.0.2",), "10.0.0.2"),
        ("10.0.0.1", (), "10.0.0.1"),
        ("10.0.0.1", ("[2001:db8::7]:443",), "2001:db8::7"),
        ("::ffff:10.0.0.1", ("198.51.100.7",), "198.51.100.7"),
        ("", ("198.51.100.7",), "unknown"),
    ],
)
def test_the_address_is_the_first_that_no_trusted_proxy_has(
    peer: str, forwarded: tuple[str, ...], found: str
) -> None:
    assert Addresses(["10.0.0.0/8"]).of(request(peer, *forwarded)) == found
    assert Addresses([]).of(request("127.0.0.1", *forwarded)) == "127.0.0.1"


@pytest.mark.parametrize(
    ("peer", "said", "secure"),
    [
        ("10.0.0.1", "https", True),
        ("10.0.0.1", "http, HTTPS", True),
        ("10.0.0.1", "https, http", False),  # the proxy's own word stands last
        ("192.0.2.1", "https", False),
        ("", "https", False),
    ],
)
def test_only_a_trusted_proxy_can_say_https(peer: str, said: str, secure: bool) -> None:
    scope = request(peer)
    scope["headers"].append((b"x-forwarded-proto", said.encode()))
    assert Addresses(["10.0.0.0/8"]).over_tls(scope) is secure


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    assert group("2001:db8:1:2:3::4") == group("2001:db8:1:2:ffff::1") == "2001:db8:1:2::/64"
    assert group("192.0.2.1") == "192.0.2.1"


@pytest.mark.parametrize(
    "settings",
    [
        {"rate_limit_key": "often"},
        {"rate_limit_address": "0/minute"},
        {"rate_limit_address": "5/fortnight"},
        {"trusted_proxies": ("proxy.example",)},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match=next(iter(settings))):
        Config(**settings)
