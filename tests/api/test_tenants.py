"""What another tenant has does not exist: tried over every route and every method there is.

What is tried comes from the tables of the server itself. A route or method that names something
unknown fails here, until these tables say what another tenant could name there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import msgspec
import pytest
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from capsule.edge.methods import build_methods
from capsule.edge.scopes import METHODS, ROUTES, method_scope, route_scopes
from capsule.edge.site import build_web
from capsule.service.caller import KeyScope
from capsule.service.template_names import inner
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

ADMIN = "operator-key-of-the-tests"
NOBODYS = "abcdefghijklmnop"  # as a sandbox's id looks
TEMPLATE = """
root: host
default_language: sh
languages: {sh: {file: ".capsule-{id}.sh", command: [sh, "{file}"]}}
"""


class Anything:
    """In the place of the services, for the tables alone."""

    def __getattr__(self, name: str) -> Any:
        return self


ANYTHING = cast(Any, Anything())
WEB = build_web(ANYTHING, ANYTHING, "1", sessions=ANYTHING)
RPC = build_methods(ANYTHING, ANYTHING)
HTTP = [route for route in WEB.routes if isinstance(route, Route)]
SOCKETS = [route for route in WEB.routes if isinstance(route, WebSocketRoute)]
OPERATIONS = sorted((verb, r.path) for r in HTTP for verb in (r.methods or ()))


@dataclass(frozen=True, slots=True)
class Place:
    """A server with two tenants, of which one has one of everything."""

    server: RealServer
    admin: httpx.Client
    blue: httpx.Client
    red: httpx.Client
    box: str
    names: dict[str, str]  # what blue has, by the word that routes and methods call it

    def rpc(self, who: httpx.Client, method: str, params: Any) -> Any:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return who.post("/rpc", json=call).json()


@pytest.fixture(scope="module")
def place(agent_binary: object) -> Iterator[Place]:
    with real_server(API_KEYS=ADMIN) as server:
        admin = client(server, ADMIN)
        keys = {}
        for tenant in ("blue", "red"):
            made = admin.post("/v1/keys", json={"tenant": tenant, "scopes": ["run"]})
            keys[tenant] = made.json()["key"]
        blue, red = client(server, keys["blue"]), client(server, keys["red"])
        templates = server.base / "data" / "templates"
        templates.mkdir(exist_ok=True)
        (templates / f"{inner('blue', 'bluesown')}.yaml").write_text(TEMPLATE)
        hidden = {"name": "bluesecret", "value": "bluevalue"}
        secret = blue.post("/secrets", json=hidden).json()
        build = blue.post("/v3/templates", json={"name": "bluesown"}).json()
        volume = blue.post("/volumes", json={"name": "bluevolume"}).json()
        mount = {"name": "bluevolume", "path": "/workspace/data"}
        body = {"template": "python", "volumes": [mount], "checkpoint": "each", "ttl_ms": 600_000}
        box = blue.post("/v1/sandboxes", json=body).json()["id"]
        ran = blue.post(f"/v1/sandboxes/{box}/execs", json={"cmd": "echo secret > bluefile"}).json()
        context = blue.post(f"/v1/sandboxes/{box}/contexts", json={"language": "python"}).json()
        kept = blue.post(f"/v1/sandboxes/{box}/snapshots", json={"name": "bluesnapshot"})
        kept.raise_for_status()
        session = {"session_id": "bluesession", "environment": "bash"}
        blue.post("/api/sessions", json=session).raise_for_status()
        playground = {"sessionId": "blueplayground", "template": "bash"}
        blue.post("/api/playground/container", json=playground).raise_for_status()
        hook = blue.post("/v1/webhooks", json={"url": "https://blue.invalid/"}).json()
        names = {
            "id": box,
            "session_id": "bluesession",
            "playground": "blueplayground",
            "exec_id": ran["exec_id"],
            "context": context["id"],
            "snapshot": "bluesnapshot",
            "volume": "bluevolume",
            "volume_id": volume["volumeID"],
            "template": "bluesown",
            "build": build["buildID"],
            "secret_id": secret["secretID"],
            "secret": "bluesecret",
            "webhook_id": hook["webhook_id"],
            "delivery_id": "bluedelivery",
        }
        yield Place(server, admin, blue, red, box, names)
        for each in (admin, blue, red):
            each.close()


def client(server: RealServer, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(verify=False, base_url=server.url, headers=headers, timeout=15)


def named(path: str, names: dict[str, str]) -> str:
    """A route's path with these names in it. Fails for an unknown word."""
    words = {
        **names,
        "path:path": "workspace/bluefile",
        "key_id": "nosuchkey",
        "artifact_id": "nosuchartifact",
        "template_id": names["snapshot"],
        "template_name": names["template"],
        "alias": names["template"],
        "build_id": names["build"],
        "hash": "ab" * 32,
        "kind": "environments",
        "tenant": "blue" if names["id"] != NOBODYS else "nobodys",
        "name": names.get(_kind(path), "nosuch"),
    }
    for word, value in words.items():
        path = path.replace(f"{{{word}}}", value)
    assert "{" not in path, f"{path}: say in tests/api/test_tenants.py what this is"
    return path


def _kind(path: str) -> str:
    """/v1/volumes/{name} → volume."""
    return f"{path}//".split("/")[2].removesuffix("s")


def strangers(place: Place) -> dict[str, str]:
    """Names of the same kinds that no tenant has."""
    return {kind: (NOBODYS if kind == "id" else "nobodys") for kind in place.names}


def same_for_both(place: Place, ask: Callable[[dict[str, str]], tuple[Any, str]]) -> Any:
    """What blue's names and those of nothing both get: a status or code, in the same words."""
    seen = []
    for names in (place.names, strangers(place)):
        status, text = ask(names)
        for name in sorted(names.values(), key=len, reverse=True):  # it may repeat what was asked
            text = text.replace(name, "NAME")
        seen.append((status, text))
    assert seen[0] == seen[1]
    return seen[0][0]


# These take a name of the caller's own choice, also one that another tenant has.
MAKES = {("POST", "/v1/templates/{name}/build"), ("PUT", "/v1/snapshots/{name}/archive")}
MAKES |= {("GET", "/templates/{template_name}/files/{hash}")}  # a place for files of one's own
EVERYBODYS = {"/api/registry/{kind}"}
NAMED = [(verb, path) for verb, path in OPERATIONS if "{" in path]


@pytest.mark.parametrize(("verb", "path"), NAMED, ids=lambda each: each)
def test_a_route_gives_nothing_of_others(place: Place, verb: str, path: str) -> None:
    def ask(names: dict[str, str]) -> tuple[int, str]:
        answer = place.red.request(verb, named(path, names), params={"from": 0})
        return answer.status_code, answer.text

    status = same_for_both(place, ask)
    if scope_of(verb, path) is KeyScope.ADMIN or path == "/v1/tenants/{tenant}":
        assert status == 403
    elif (verb, path) not in MAKES and path not in EVERYBODYS:
        assert status == 404


@pytest.mark.parametrize(("verb", "path"), [each for each in OPERATIONS if "{" not in each[1]])
def test_a_route_without_names_gives_nothing_of_others(place: Place, verb: str, path: str) -> None:
    if verb in ("GET", "HEAD") and path != PLAYGROUND:
        answer = place.red.request(verb, path)
        assert answer.status_code in (200, 307, 403), answer.text
        assert [name for name in place.names.values() if name in answer.text] == []
        return
    assert path == PLAYGROUND or (verb, path) in BODIES, f"{verb} {path}: what can it name?"
    for body in BODIES.get((verb, path), [{"sessionId": "{playground}"}]):

        def ask(names: dict[str, str]) -> tuple[int, str]:
            this = filled(body, names)  # noqa: B023
            how: dict[str, Any] = {"json": this}
            if path == "/upload":
                how = {"data": this, "files": {"file": b"x"}}
            elif verb in ("GET", "HEAD") or (verb, path) not in BODIES:
                how = {"params": this}
            answer = place.red.request(verb, path, **how)
            return answer.status_code, answer.text

        assert same_for_both(place, ask) in (403, 404)


PLAYGROUND = "/api/playground/container"  # its GET and DELETE name a session in the query
# What a request without a name in its path can name in its body.
_CREATES: list[dict[str, Any]] = [
    {"template": "{template}"},
    {"snapshot": "{snapshot}"},
    {"volumes": [{"name": "{volume}", "path": "/workspace/v"}]},
]
_OF_E2B: list[dict[str, Any]] = [
    {"templateID": "{template}"},
    {"templateID": "{snapshot}"},
    {"templateID": "bash", "volumeMounts": [{"name": "{volume}", "path": "/workspace/v"}]},
]
BODIES: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("POST", "/v2/sandboxes"): _OF_E2B,
    ("POST", "/sandboxes"): _OF_E2B,
    ("POST", "/v1/sandboxes"): _CREATES,
    ("POST", "/v3/templates"): [],  # as below
    ("POST", "/secrets"): [],  # as below
    ("POST", "/templates/tags"): [{"target": "{template}", "tags": ["x"]}],
    ("DELETE", "/templates/tags"): [{"name": "{template}", "tags": ["x"]}],
    ("POST", "/volumes"): [],  # as below
    ("POST", "/v1/volumes"): [],  # names of one's own: see test_names_are_each_tenants_own
    ("POST", "/v1/webhooks"): [],
    ("POST", "/v1/keys"): [{}, {"tenant": "blue"}],
    ("POST", "/create_session"): [{"template": "{template}"}],
    ("POST", "/execute"): [{"session_id": "{id}", "command": "true"}],
    ("POST", "/cleanup"): [{"session_id": "{id}"}],
    ("POST", "/upload"): [{"session_id": "{id}"}],
    ("POST", PLAYGROUND): [{"sessionId": "x", "template": "{template}"}],
    ("POST", "/api/playground/sync"): [{"sessionId": "{playground}", "files": []}],
    ("POST", "/api/playground/install"): [{"sessionId": "{playground}", "packages": ["./a"]}],
    ("POST", "/api/playground/execute"): [{"sessionId": "{playground}", "code": "1"}],
    ("POST", "/api/sessions"): [{"environment": "{template}"}],
    ("POST", "/api/e2b/execute"): [{"session_id": "{session_id}", "code": "1"}],
    ("POST", "/api/e2b/files"): [{"session_id": "{session_id}", "path": "a", "content": "b"}],
}


def filled(body: Any, names: dict[str, str]) -> Any:
    text = json.dumps(body)
    for kind, name in names.items():
        text = text.replace(f"{{{kind}}}", name)
    return json.loads(text)


# What a method needs besides the sandbox's id, by the name of the field.
FIELDS: dict[str, Any] = {
    "cmd": ["true"],
    "code": "1",
    "commands": [{"cmd": ["true"]}],
    "ttl_ms": 1000,
    "path": "/workspace/bluefile",
    "content": "",
    "data": "",
    "from": "a",
    "to": "b",
    "mode": 420,
    "rows": 24,
    "cols": 80,
    "url": "https://red.invalid/",
}
STEPS = {"sandbox.v1.diff": {"from": 0}, "sandbox.v1.undo": {"to": 0}}


def params_of(method: str, names: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(RPC[method].params):
        name = field.encode_name
        if not field.required and name != "id":
            continue
        if name == "name":
            found[name] = names.get(method.split(".")[0], "redsown")
        elif name in ("key_id", "tenant"):
            found[name] = "nosuch"
        elif name in names:
            found[name] = names[name]
        else:
            assert name in FIELDS, f"{method}: say what {name} may be"
            found[name] = STEPS.get(method, FIELDS).get(name, FIELDS[name])
    return found


ON_SANDBOX = [
    name
    for name, method in RPC.items()
    if any(field.encode_name == "id" for field in msgspec.structs.fields(method.params))
]
BY_NAME = ["snapshot.v1.get", "snapshot.v1.delete", "volume.v1.get", "volume.v1.delete"]
BY_NAME += ["template.v1.get", "template.v1.delete"]
BY_NAME += ["webhook.v1.get", "webhook.v1.delete", "webhook.v1.deliveries"]
BY_NAME += ["webhook.v1.redeliver"]
LISTS = ["sandbox.v1.list", "snapshot.v1.list", "volume.v1.list", "template.v1.list"]
LISTS += ["webhook.v1.list"]
MAKE = {
    "sandbox.v1.create": _CREATES,
    "sandbox.create": _CREATES,
    "volume.v1.create": [],
    "webhook.v1.create": [],
    "template.v1.build": [],
}
OF_ADMINS = [name for name, scope in METHODS.items() if scope is KeyScope.ADMIN]


def test_every_method_is_tried() -> None:
    tried = {*ON_SANDBOX, *BY_NAME, *LISTS, *MAKE, *OF_ADMINS}
    tried.add("tenant.v1.get")  # of one's own tenant, or for admins: see test_quotas
    assert tried == set(RPC), "say in tests/api/test_tenants.py how a stranger could use it"


@pytest.mark.parametrize(
    ("method", "body"),
    [
        *((method, None) for method in (*ON_SANDBOX, *BY_NAME)),
        *((method, body) for method, bodies in MAKE.items() for body in bodies),
    ],
)
def test_a_method_gives_nothing_of_others(place: Place, method: str, body: Any) -> None:
    def ask(names: dict[str, str]) -> tuple[str, str]:
        params = filled(body, names) if body else params_of(method, names)
        answer = place.rpc(place.red, method, params)
        return answer["error"]["data"]["code"], json.dumps(answer)

    assert same_for_both(place, ask) == "not_found"


@pytest.mark.parametrize("path", [route.path for route in SOCKETS])
def test_a_socket_gives_nothing_of_others(place: Place, path: str) -> None:
    headers = {"Authorization": place.red.headers["Authorization"]}

    def ask(names: dict[str, str]) -> tuple[int, str]:
        url = f"ws://127.0.0.1:{place.server.port}{named(path, names)}"
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers, proxy=None)
        response = refused.value.response
        return response.status_code, response.body.decode()

    assert same_for_both(place, ask) == 404


@pytest.mark.parametrize("method", LISTS)
def test_a_list_has_what_is_the_callers(place: Place, method: str) -> None:
    names = set(place.names.values())
    theirs = json.dumps(place.rpc(place.red, method, {}))
    assert [name for name in names if name in theirs] == []
    own = json.dumps(place.rpc(place.blue, method, {}))
    assert [name for name in names if name in own] != []


@pytest.mark.parametrize("method", OF_ADMINS)
def test_a_method_of_the_operator_takes_an_admin(place: Place, method: str) -> None:
    answer = place.rpc(place.red, method, params_of(method, place.names))
    assert answer["error"]["data"]["code"] == "forbidden"
    assert "scope admin" in answer["error"]["message"]


def test_no_spelling_of_an_id_helps_and_an_ended_one_was_never_there(place: Place) -> None:
    box = place.box
    encoded = "".join(f"%{ord(c):02x}" for c in box)
    spellings = [box.upper(), encoded, f"{box}%00", f"{box}%20", f"%2e/{box}", f"{box}/"]
    for spelling in (*spellings, f"/{box}", f"x/../{box}", f"{box}?tenant=blue"):
        answer = place.red.get(f"/v1/sandboxes/{spelling}")
        assert answer.status_code == 404, spelling
        assert "created_at" not in answer.text
    made = place.blue.post("/v1/sandboxes", json={"template": "bash"}).json()["id"]
    place.blue.delete(f"/v1/sandboxes/{made}").raise_for_status()
    assert place.blue.get(f"/v1/sandboxes/{made}").status_code == 410
    theirs, none = (place.red.get(f"/v1/sandboxes/{id}") for id in (made, NOBODYS))
    assert theirs.status_code == none.status_code == 404
    assert theirs.text.replace(made, NOBODYS) == none.text


def test_names_are_each_tenants_own(place: Place) -> None:
    """Of volumes, snapshots, sessions and playgrounds, and idempotency keys."""
    assert place.red.post("/v1/volumes", json={"name": "bluevolume"}).status_code == 201
    assert place.red.post("/v1/volumes", json={"name": "bluevolume"}).status_code == 409
    mount = {"name": "bluevolume", "path": "/workspace/data"}
    body = {"template": "bash", "volumes": [mount]}
    made = [
        who.post("/v1/sandboxes", json=body, headers={"Idempotency-Key": "k1"}).json()["id"]
        for who in (place.red, place.blue, place.red)
    ]
    assert made[0] == made[2] != made[1]
    kept = place.red.post(f"/v1/sandboxes/{made[0]}/snapshots", json={"name": "bluesnapshot"})
    assert kept.status_code == 201, kept.text
    session = {"session_id": "bluesession", "environment": "bash"}
    # Not red's: its log would be left behind, and tried for by other tests.
    place.admin.post("/api/sessions", json=session).raise_for_status()
    place.admin.post("/api/sessions/bluesession/close").raise_for_status()
    playground = {"sessionId": "blueplayground", "template": "bash"}
    assert place.red.post(PLAYGROUND, json=playground).json()["existing"] is False
    for who, id in ((place.red, made[0]), (place.blue, made[1])):
        who.delete(f"/v1/sandboxes/{id}").raise_for_status()
    for who, path in (
        (place.red, "/v1/snapshots/bluesnapshot"),
        (place.red, "/v1/volumes/bluevolume"),
        (place.admin, "/api/sessions/bluesession"),
        (place.red, f"{PLAYGROUND}?sessionId=blueplayground"),
    ):
        who.delete(path).raise_for_status()
        assert place.blue.get(path).status_code == 200
    assert place.blue.get("/api/sessions/bluesession").json()["state"] == "open"


def test_a_tenants_template_is_its_own_and_the_others_are_the_operators(place: Place) -> None:
    listed = {each["name"] for each in place.blue.get("/v1/templates").json()["templates"]}
    assert {"bluesown", "python"} <= listed
    made = place.blue.post("/v1/sandboxes", json={"template": "bluesown"})
    assert made.status_code == 201, made.text
    assert (made.json()["template"], made.json()["tenant"]) == ("bluesown", "blue")
    id = made.json()["id"]
    ran = place.blue.post(f"/v1/sandboxes/{id}/execs", json={"cmd": "echo $0"})
    assert ran.json()["exit_code"] == 0
    place.blue.delete(f"/v1/sandboxes/{id}").raise_for_status()
    assert place.blue.get(f"/v1/templates/{inner('blue', 'bluesown')}").status_code == 404
    refused = place.blue.delete("/v1/templates/python")
    assert refused.status_code == 403 and "scope admin" in refused.text
    refused = place.blue.post("/v1/templates/python/build", content=b"x")
    assert refused.status_code == 409 and "everybody" in refused.text


def test_only_an_admin_may_name_another_tenant(place: Place) -> None:
    def ids(tenant: str) -> list[str]:
        listed = place.admin.get("/v1/sandboxes", params={"tenant": tenant}).json()
        return [each["id"] for each in listed["sandboxes"]]

    assert place.box in ids("blue") and place.box in ids("*")
    assert place.box not in place.admin.get("/v1/sandboxes").text
    for wanted in ("blue", "*"):
        refused = place.red.get("/v1/sandboxes", params={"tenant": wanted})
        assert refused.status_code == 403
    box = f"/v1/sandboxes/{place.box}"
    for who, path, tenant, status in (
        (place.admin, box, "", 404),
        (place.admin, box, "blue", 200),
        (place.red, box, "blue", 403),
        (place.red, "/v1/sandboxes", "red", 200),
        (place.admin, "/v1/sandboxes", "a/b", 400),
    ):
        headers = {"X-Capsule-Tenant": tenant} if tenant else {}
        assert who.get(path, headers=headers).status_code == status


def scope_of(verb: str, path: str) -> KeyScope | None:
    return ROUTES[path]["GET" if verb == "HEAD" else verb]


def test_every_route_and_method_has_a_scope_and_every_scope_a_route() -> None:
    found: dict[str, set[str]] = {}
    for route in WEB.routes:
        found.setdefault(getattr(route, "path", ""), set()).update(route_scopes(route))
    assert found == {path: set(verbs) for path, verbs in ROUTES.items()}
    assert set(METHODS) == set(RPC)
    with pytest.raises(LookupError, match="has no scope"):
        route_scopes(Route("/v1/new", lambda request: None))
    with pytest.raises(LookupError, match="has no scope"):
        method_scope("sandbox.v1.new")


def test_a_key_that_may_read_may_do_nothing_else(place: Place) -> None:
    made = place.admin.post("/v1/keys", json={"tenant": "blue", "scopes": ["read"]}).json()
    with client(place.server, made["key"]) as reader:
        for verb, path in OPERATIONS:
            scope = scope_of(verb, path)
            if scope in (KeyScope.RUN, KeyScope.ADMIN):
                answer = reader.request(verb, named(path, place.names))
                assert answer.status_code == 403, f"{verb} {path}: {answer.text}"
        for method, scope in METHODS.items():
            if scope is not KeyScope.READ:
                answer = place.rpc(reader, method, params_of(method, place.names))
                assert answer["error"]["data"]["code"] == "forbidden", method
        assert reader.get(f"/v1/sandboxes/{place.box}").status_code == 200
        content = reader.get(f"/v1/sandboxes/{place.box}/files/workspace/bluefile")
        assert content.text == "secret\n"
