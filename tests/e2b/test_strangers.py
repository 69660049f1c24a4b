"""What belongs to another tenant does not exist: on E2B's surface and at the ports of programs.

The calls come from the server's own tables. Each asks for a sandbox of blue's and for one that does
not exist: the two answers must be the same. tests/api/test_tenants.py has the routes with a key.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from capsule.edge.e2b.access import Access
from capsule.edge.e2b.doors import BEHIND
from capsule.edge.e2b.envd import Envd
from capsule.edge.e2b.interpreter import Interpreter
from capsule.edge.site import rooms_of
from tests.api.test_tenants import (
    ANYTHING,
    EVERYBODYS,
    MAKES,
    NAMED,
    NOBODYS,
    Place,
    named,
    place,
    strangers,
)
from tests.support.ports import by_header, by_name, start_app
from tests.support.servers import RealServer

__all__ = ["place"]

pytestmark = pytest.mark.real

ROOMS = rooms_of(*(6 * [ANYTHING]))
ENVD, INTERPRETER = (
    (port, room) for port, room in sorted(ROOMS.items())
)  # fails for a third: it has to be tried here, too
PROGRAM = 3000


def calls() -> Iterator[tuple[int, str, str]]:
    """Port, verb and path of all that is behind the ports of a sandbox."""
    for verb, path in cast(Envd, ENVD[1]).calls:
        yield ENVD[0], verb, path
    for verb, *parts in cast(Interpreter, INTERPRETER[1]).calls:
        yield INTERPRETER[0], verb, "/" + "/".join(parts)
    for verb in ("GET", "POST", "DELETE", "OPTIONS"):
        yield PROGRAM, verb, "/"


CALLS = sorted(calls())
Headers = dict[str, str]
Door = Callable[[str, int], Headers]  # the headers of a request for a port of a sandbox


class Ways(NamedTuple):
    """The requests that may not reach what is blue's."""

    place: Place
    http: httpx.Client  # without a key
    context: str  # blue's
    whos: list[dict[str, str]]  # keys and tokens of others
    access: Access

    def both(
        self, verb: str, path: str, door: Door, port: int, who: Headers | None = None
    ) -> Answers:
        """The answers about blue's sandbox, and about one that does not exist."""
        body: Any = {} if verb == "POST" else None
        url = self.place.server.url + path
        theirs, none = (
            self.http.request(verb, url, headers={**door(id, port), **(who or {})}, json=body)
            for id in (self.place.box, NOBODYS)
        )
        return Answers(theirs, none, self.place.box)


class Answers(NamedTuple):
    theirs: httpx.Response
    none: httpx.Response
    id: str

    def tell_nothing(self, *statuses: int) -> None:
        theirs, none = self.theirs, self.none
        assert theirs.status_code == none.status_code, (theirs.text, none.text)
        assert plain(theirs.text, self.id) == plain(none.text, self.id)
        assert theirs.status_code in statuses, theirs.text


def plain(text: str, id: str) -> str:
    return text.lower().replace(id.lower(), "ID").replace(NOBODYS, "ID")


@pytest.fixture(scope="module")
def ways(place: Place) -> Iterator[Ways]:
    red = place.red.headers["Authorization"].removeprefix("Bearer ")
    access = Access.open(place.server.base / "data")
    own = place.red.post("/v1/sandboxes", json={"template": "bash"}).json()["id"]
    blue = place.blue.headers["Authorization"].removeprefix("Bearer ")
    start_app(place.server.url, place.box, key=blue)
    whos = [
        {},
        {"x-api-key": red},
        {"authorization": f"Bearer {red}"},
        {"authorization": f"Bearer {red}", "x-capsule-tenant": "blue"},
        {
            "x-access-token": access.token(own),
            "e2b-traffic-access-token": access.traffic_token(own),
        },
        {"x-access-token": access.traffic_token(place.box)},
        {"x-access-token": access.volume_token(place.box), "x-api-key": red},
        {"x-access-token": access.token(place.box)[:-1]},
        {"x-access-token": "", "authorization": "Basic dXNlcjo="},
    ]
    with httpx.Client(base_url=place.server.url, timeout=15) as http:
        yield Ways(place, http, place.names["context"], whos, access)
    place.red.delete(f"/v1/sandboxes/{own}").raise_for_status()
    # Otherwise the end of the server waits for its program.
    place.blue.delete(f"/v1/sandboxes/{place.box}").raise_for_status()


def test_what_is_tried_is_there_for_its_owner(ways: Ways) -> None:
    """Otherwise the tests below prove nothing."""
    assert set(ROOMS) == set(BEHIND) and len(CALLS) >= 30
    box, blue = ways.place.box, dict(ways.place.blue.headers)
    for port, path in ((ENVD[0], "/health"), (INTERPRETER[0], "/contexts"), (PROGRAM, "/")):
        found = ways.http.get(path, headers={**blue, **by_name(box, port)})
        assert found.status_code in (200, 204), (port, found.text)
    token = {"x-access-token": ways.access.token(box)}
    for port, path in ((ENVD[0], "/process.Process/List"), (INTERPRETER[0], "/execute")):
        body = {"code": "1"} if path == "/execute" else {}
        found = ways.http.post(path, headers={**token, **by_header(box, port)}, json=body)
        assert found.status_code == 200, found.text


@pytest.mark.parametrize(("port", "verb", "path"), CALLS)
def test_a_call_tells_nothing_of_what_others_have(
    ways: Ways, port: int, verb: str, path: str
) -> None:
    path = path.replace("{name}", ways.context)
    for who in ways.whos:
        for way in (by_header, by_name):
            answers = ways.both(verb, path, way, port, who)
            answers.tell_nothing(401, 404, 502)
            if "x-api-key" in who:
                assert answers.theirs.status_code == 404


def coded(text: str) -> str:
    return "".join(f"%{ord(c):02x}" for c in text)


def at_host(form: str) -> Door:
    return lambda id, port: {"host": form.format(id, port, ID=id.upper(), coded=coded(id))}


def with_id(form: str) -> Door:
    return lambda id, port: by_header(form.format(id, ID=id.upper(), coded=coded(id)), port)


SPELLINGS = {
    form: at_host(form)
    for form in (
        "{1}-{ID}.LOCALHOST",
        "{1}-{0}.localhost.",
        "{1}-{0}..localhost",
        "{1}-{0}.localhost:{1}",
        "{1}-{coded}.localhost",
        "0{1}-{0}.localhost",
        "{1}-{0}",
        "{1}-{0}.127.0.0.1",
        "x.{1}-{0}.localhost",
        "{1}-{0}.localhost/../x",
        "user@{1}-{0}.localhost",
        "{1}-{0}x.localhost",
    )
}
SPELLINGS |= {
    form: with_id(form) for form in ("{ID}", "{0}.", "{coded}", "/{0}", "{0}/", "{0}%00", "{0}x")
}
SPELLINGS["port"] = lambda id, port: {**by_header(id, port), "e2b-sandbox-port": f"0{port}"}
SPELLINGS["both"] = lambda id, port: {**by_header(id, port), **by_name(NOBODYS, port)}
SPELLINGS["twice"] = lambda id, port: {**by_header(NOBODYS, port), **by_name(id, port)}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_of_a_sandbox_helps(ways: Ways, spelling: str) -> None:
    for port, path in (
        (ENVD[0], "//process.Process/List"),
        (ENVD[0], "/%70rocess.Process/List/"),
        (INTERPRETER[0], "/contexts"),
        (INTERPRETER[0], "//health"),
        (PROGRAM, "//left"),
    ):
        for who in ways.whos[:5]:
            answers = ways.both("GET", path, SPELLINGS[spelling], port, who)
            if path.endswith("/health") and answers.theirs.status_code == 200:
                assert answers.theirs.json()["status"] == "ok"  # the server's own
            else:
                answers.tell_nothing(400, 401, 403, 404, 502)


@pytest.mark.parametrize("port", [*ROOMS, PROGRAM])
def test_a_socket_tells_nothing(ways: Ways, port: int) -> None:
    for who in ways.whos[:4]:
        theirs, none = (
            refusal(ways.place.server, {**by_header(id, port), **who})
            for id in (ways.place.box, NOBODYS)
        )
        assert plain(theirs, ways.place.box) == plain(none, ways.place.box)


def refusal(server: RealServer, headers: dict[str, str]) -> str:
    url = f"ws://127.0.0.1:{server.port}/"
    with pytest.raises(InvalidStatus) as refused:
        connect(url, additional_headers=headers, proxy=None)
    answer = refused.value.response
    assert answer.status_code in (400, 404, 502)
    return f"{answer.status_code} {answer.body.decode()}"


def signed(token: str, path: str, operation: str = "read") -> str:
    digest = hashlib.sha256(f"{path}:{operation}::{token}".encode()).digest()
    signature = "v1_" + base64.b64encode(digest).decode().rstrip("=")
    return urlencode({"path": path, "signature": signature})


def test_a_link_opens_what_was_signed_alone(ways: Ways) -> None:

    token, file = ways.access.token(ways.place.box), "/workspace/bluefile"
    good = signed(token, file)
    assert ways.http.get(f"/files?{good}").text == "secret\n"
    red = ways.place.red.post("/v1/sandboxes", json={"template": "bash"}).json()["id"]
    url = ways.place.server.url
    for query in (
        good.replace("bluefile", "bluefile2"),
        good.replace("workspace", "workspace%2F."),
        good.replace("bluefile", "BLUEFILE"),
        f"{good}&username=root",
        f"{good}&signature_expiration=99999999999",
        signed(token, file, "write"),
        signed(token[:-1], file),
        signed(ways.access.traffic_token(ways.place.box), file),
        f"path={file}&signature=",
        f"path={file}&signature=v1_",
    ):
        for path in ("/files", "//files", "/files/"):
            for who in ways.whos:
                found = ways.http.get(f"{url}{path}?{query}", headers=who)
                assert found.status_code in (401, 403, 404), (path, query, found.text)
                assert "secret" not in found.text
    of_red = signed(ways.access.token(red), file)
    assert ways.http.get(f"/files?{of_red}").status_code == 404  # red has no such file
    answers = ways.both("GET", f"/files?{of_red}", by_header, ENVD[0])
    answers.tell_nothing(401)
    ways.place.red.delete(f"/v1/sandboxes/{red}").raise_for_status()


ROUTES = [each for each in NAMED if each not in MAKES and each[1] not in EVERYBODYS]


def test_an_upload_address_belongs_to_the_tenant_that_asked(ways: Ways) -> None:
    hash = "ab" * 32
    asked = ways.place.red.get(f"/templates/redsown/files/{hash}").json()
    url = urlsplit(asked["url"])
    query = dict(parse_qsl(url.query))
    for change in ({"tenant": "blue"}, {"expires": "99999999999"}, {"signature": ""}):
        found = ways.http.put(f"{url.path}?{urlencode({**query, **change})}", content=b"x")
        assert found.status_code == 401, found.text
    assert ways.http.put(f"{url.path[:-1]}c?{url.query}", content=b"x").status_code == 401


@pytest.mark.parametrize(("verb", "path"), ROUTES)
def test_without_a_key_there_is_nothing(ways: Ways, verb: str, path: str) -> None:
    theirs, none = (
        ways.http.request(verb, named(path, names))
        for names in (ways.place.names, strangers(ways.place))
    )
    assert theirs.status_code == none.status_code == 401
    assert theirs.text == none.text
