"""Who may reach what listens in a sandbox, on a server with keys; and no program sees a key."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from capsule.edge.e2b.access import Access
from tests.support.ports import by_header, by_name, sandbox, start_app
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

ADMIN = "operator-key-of-the-tests"
NOBODYS = "abcdefghijklmnop"


@dataclass(frozen=True, slots=True)
class Place:
    server: RealServer
    http: httpx.Client
    blue: str  # the key of the tenant with these sandboxes
    reader: str  # blue's, with the scope `read`
    red: str
    private: str
    public: str

    def get(self, id: str, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.get("/", headers={**by_name(id), **named})


@pytest.fixture(scope="module")
def place(agent_binary: object) -> Iterator[Place]:
    with (
        real_server(API_KEYS=ADMIN, SANDBOX_DOMAIN="boxes.example:8443") as server,
        httpx.Client(base_url=server.url, timeout=15) as http,
    ):

        def key(tenant: str, scope: str) -> str:
            asked = {"tenant": tenant, "scopes": [scope]}
            made = http.post("/v1/keys", json=asked, headers={"x-api-key": ADMIN})
            return str(made.json()["key"])

        blue, reader, red = key("blue", "run"), key("blue", "read"), key("red", "run")
        with (
            sandbox(server.url, blue) as private,
            sandbox(server.url, blue, ports="public") as public,
        ):
            start_app(server.url, private, key=blue)
            start_app(server.url, public, key=blue)
            yield Place(server, http, blue, reader, red, private, public)


def shown(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {name.lower(): value for name, value in answer.json()["headers"]}


def test_private_ports_open_to_a_key_of_their_tenant(place: Place) -> None:
    for headers in ({"x_api_key": place.blue}, {"authorization": f"Bearer {place.blue}"}):
        seen = shown(place.get(place.private, **headers))
        assert place.blue not in json.dumps(seen)
        assert not seen.keys() & {"x-api-key", "authorization"}
    seen = shown(place.get(place.private, x_api_key=place.blue, authorization="Bearer the-apps"))
    assert seen["authorization"] == "Bearer the-apps"
    assert place.get(place.private, x_api_key=place.reader).status_code == 403
    for id, expected in ((place.private, "private"), (place.public, "public")):
        info = place.http.get(f"/v1/sandboxes/{id}", headers={"x-api-key": place.blue})
        assert info.json()["ports"] == expected


@pytest.mark.parametrize("way", [by_name, by_header])
@pytest.mark.parametrize("spelling", [str, str.upper])
def test_to_another_tenant_they_do_not_exist(place: Place, way: Any, spelling: Any) -> None:
    """Nor without a known key: the answer is that for a sandbox that is not there."""
    for key, status in ((place.red, 404), (None, 502), ("not-a-key-of-anyone", 502)):
        headers = {} if key is None else {"x-api-key": key}
        theirs, nobodys = (
            place.http.get("/", headers={**way(spelling(id)), **headers})
            for id in (place.private, NOBODYS)
        )
        assert theirs.status_code == nobodys.status_code == status
        plain = [a.text.lower().replace(place.private, NOBODYS) for a in (theirs, nobodys)]
        assert plain[0] == plain[1]


def test_only_an_admin_may_name_another_tenant(place: Place) -> None:
    assert place.get(place.private, x_api_key=ADMIN).status_code == 404
    seen = shown(place.get(place.private, x_api_key=ADMIN, x_capsule_tenant="blue"))
    assert not seen.keys() & {"x-api-key", "x-capsule-tenant"}
    for key, tenant in ((ADMIN, "red"), (ADMIN, "a/b"), (place.red, "blue")):
        refused = place.get(place.private, x_api_key=key, x_capsule_tenant=tenant)
        assert refused.status_code == 404, refused.text
    assert place.get(place.private, x_capsule_tenant="blue").status_code == 502
    assert place.get(place.private, x_api_key=place.blue, x_capsule_tenant="red").status_code == 200
    contexts = by_name(place.private, 49999)
    headers = {**contexts, "x-api-key": ADMIN, "x-capsule-tenant": "blue"}
    assert place.http.get("/contexts", headers=headers).status_code == 200


def test_the_health_of_a_sandbox_is_for_those_to_whom_its_ports_are_open(place: Place) -> None:
    token = Access.open(place.server.base / "data").token(place.private)
    for port, running in ((49983, 204), (49999, 200)):
        for id, headers, status in (
            (place.public, {}, running),
            (place.private, {}, 502),
            (place.private, {"x-api-key": place.red}, 404),
            (place.private, {"x-api-key": place.blue}, running),
            (place.private, {"x-access-token": token}, running),
        ):
            found = place.http.get("/health", headers={**by_header(id, port), **headers})
            assert found.status_code == status, (port, headers, found.text)


def test_a_key_is_kept_from_public_programs_however_it_is_written(place: Place) -> None:
    seen = shown(place.get(place.public, authorization="Bearer the-apps", x_api_key="the-apps"))
    assert (seen["authorization"], seen["x-api-key"]) == ("Bearer the-apps", "the-apps")
    basic = base64.b64encode(f"user:{place.blue}".encode()).decode()
    token = Access.open(place.server.base / "data").token(place.public)
    for name, value in (
        ("authorization", f"Bearer {place.red}"),
        ("authorization", f"Bearer\t{place.blue}"),
        ("authorization", f"Token {ADMIN}"),
        ("authorization", f'Key id="1", secret="{place.blue}"'),
        ("authorization", f"Basic {basic}"),
        ("authorization", f"Bearer {token}"),
        ("authorization", " ".join(map(str, range(1000)))),
        ("x-api-key", f"the-apps, {place.blue}"),
        ("x-access-token", place.red),
    ):
        headers = {**by_name(place.public), name: value}
        assert name not in shown(place.http.get("/", headers=headers)), value
    basic = base64.b64encode(b"user:password").decode()
    for value in (f"Basic {basic}", 'Digest username="a", realm="b", nonce="c"', "x", "a, b"):
        assert shown(place.get(place.public, authorization=value))["authorization"] == value


def test_a_token_opens_one_sandbox_and_is_not_shown(place: Place) -> None:
    access = Access.open(place.server.base / "data")
    token, other = access.traffic_token(place.private), access.traffic_token(place.public)
    both = {"e2b_traffic_access_token": token, "x_access_token": access.token(place.private)}
    seen = shown(place.get(place.private, **both))
    assert token not in json.dumps(seen) and "x-access-token" not in seen
    assert place.get(place.private, e2b_traffic_access_token=other).status_code == 502
    assert shown(place.get(place.public, x_access_token="the-apps"))["x-access-token"] == "the-apps"


def test_sockets_ask_for_a_key_too(place: Place) -> None:
    url = f"ws://127.0.0.1:{place.server.port}/socket"
    named = by_header(place.private)
    with pytest.raises(InvalidStatus) as refused, connect(url, additional_headers=named):
        pass
    assert refused.value.response.status_code == 502
    key = base64.urlsafe_b64encode(place.blue.encode()).decode().rstrip("=")
    offered = [Subprotocol("chat"), Subprotocol(f"capsule.key.{key}")]
    with connect(url, subprotocols=offered, additional_headers=named) as ws:
        assert json.loads(ws.recv())["offered"] == ["chat"]


def test_names_below_the_configured_domain_lead_to_ports(place: Place) -> None:
    for domain, suffix in itertools.product(("boxes.example", "BOXES.example"), ("", ":8443")):
        headers = by_name(place.public, domain=domain + suffix)
        assert place.http.get("/", headers=headers).status_code == 200
    for domain in ("boxes.example.evil.example", "evil.example"):
        answer = place.http.get("/", headers=by_name(place.public, domain=domain))
        assert answer.status_code == 403, domain
    # Other names below it are the server's own.
    assert place.http.get("/health", headers={"host": "api.boxes.example"}).status_code == 200
