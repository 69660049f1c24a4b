"""Another tenant's anything does not exist: tried over every route and every method there is.

What is tried comes from the tables of the server itself. A route or method that names something
these tests do not know fails here, until somebody says what another tenant could name there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

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
    """Stands where the tables expect who carries them out."""

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
    """A route's path with these names in it. Fails for a word that nobody has explained."""
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
    """Names of the same kinds that nobody has."""
    return {kind: (NOBODYS if kind == "id" else "nobodys") for kind in place.names}


def told(text: str, names: dict[str, str]) -> str:
    """An answer without what was asked for, which it may repeat."""
    for name in sorted(names.values(), key=len, reverse=True):
        text = text.replace(name, "NAME")
    return text


# What takes a name of the caller's own choice: with the same name as somebody else's, it is made.
MAKES = {("POST", "/v1/templates/{name}/build"), ("PUT", "/v1/snapshots/{name}/archive")}
MAKES |= {("GET", "/templates/{template_name}/files/{hash}")}  # a place for files of one's own
EVERYBODYS = {"/api/registry/{kind}"}
NAMED = [(verb, path) for verb, path in OPERATIONS if "{" in path]


@pytest.mark.parametrize(("verb", "path"), NAMED, ids=lambda each: each)
def test_a_route_knows_nothing_of_what_others_have(place: Place, verb: str, path: str) -> None:
    nobodys = strangers(place)
    theirs = place.red.request(verb, named(path, place.names), params={"from": 0})
    none = place.red.request(verb, named(path, nobodys), params={"from": 0})
    assert theirs.status_code == none.status_code
    assert told(theirs.text, place.names) == told(none.text, nobodys)
    if scope_of(verb, path) is KeyScope.ADMIN or path == "/v1/tenants/{tenant}":
        assert theirs.status_code == 403
    elif (verb, path) not in MAKES and path not in EVERYBODYS:
        assert theirs.status_code == 404, theirs.text


@pytest.mark.parametrize(("verb", "path"), [each for each in OPERATIONS if "{" not in each[1]])
def test_a_route_without_names_tells_nothing(place: Place, verb: str, path: str) -> None:
    if (verb, path) in QUERIES:
        nobodys = strangers(place)
        theirs, none = (
            place.red.request(verb, path, params=filled(QUERIES[verb, path], names))
            for names in (place.names, nobodys)
        )
        assert theirs.status_code == none.status_code == 404
        assert told(theirs.text, place.names) == told(none.text, nobodys)
        return
    if verb in ("GET", "HEAD"):
        answer = place.red.request(verb, path)
        assert answer.status_code in (200, 307, 403), answer.text
        found = [name for name in place.names.values() if name in answer.text]
        assert found == []
        return
    assert (verb, path) in BODIES, f"{verb} {path}: what can it name that others have?"
    for body in BODIES[verb, path]:
        nobodys = strangers(place)
        theirs, none = (
            sent(place, path, filled(body, names), verb) for names in (place.names, nobodys)
        )
        assert theirs.status_code == none.status_code
        assert told(theirs.text, place.names) == told(none.text, nobodys)
        assert theirs.status_code in (403, 404), theirs.text


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
    ("POST", "/v1/webhooks"): [],  # it names nothing of anybody's
    ("POST", "/v1/keys"): [{}, {"tenant": "blue"}],
    ("POST", "/create_session"): [{"template": "{template}"}],
    ("POST", "/execute"): [{"session_id": "{id}", "command": "true"}],
    ("POST", "/cleanup"): [{"session_id": "{id}"}],
    ("POST", "/upload"): [{"session_id": "{id}"}],
    ("POST", "/api/playground/container"): [{"sessionId": "x", "template": "{template}"}],
    ("POST", "/api/playground/sync"): [{"sessionId": "{playground}", "files": []}],
    ("POST", "/api/playground/install"): [{"sessionId": "{playground}", "packages": ["./a"]}],
    ("POST", "/api/playground/execute"): [{"sessionId": "{playground}", "code": "1"}],
    ("POST", "/api/sessions"): [{"environment": "{template}"}],
    ("POST", "/api/e2b/execute"): [{"session_id": "{session_id}", "code": "1"}],
    ("POST", "/api/e2b/files"): [{"session_id": "{session_id}", "path": "a", "content": "b"}],
}
FORMS = {"/upload"}
# And what it can name in its query.
QUERIES: dict[tuple[str, str], dict[str, str]] = {
    ("GET", "/api/playground/container"): {"sessionId": "{playground}"},
    ("DELETE", "/api/playground/container"): {"sessionId": "{playground}"},
}


def sent(place: Place, path: str, body: Any, verb: str = "POST") -> httpx.Response:
    if path in FORMS:
        return place.red.post(path, data=body, files={"file": b"x"})
    return place.red.request(verb, path, json=body)


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


@pytest.mark.parametrize("method", [*ON_SANDBOX, *BY_NAME])
def test_a_method_knows_nothing_of_what_others_have(place: Place, method: str) -> None:
    nobodys = strangers(place)
    theirs = place.rpc(place.red, method, params_of(method, place.names))
    none = place.rpc(place.red, method, params_of(method, nobodys))
    assert theirs["error"]["data"]["code"] == "not_found", theirs
    assert told(json.dumps(theirs), place.names) == told(json.dumps(none), nobodys)


@pytest.mark.parametrize("method", LISTS)
def test_a_list_has_what_is_the_callers(place: Place, method: str) -> None:
    names = set(place.names.values())
    theirs = json.dumps(place.rpc(place.red, method, {}))
    assert [name for name in names if name in theirs] == []
    own = json.dumps(place.rpc(place.blue, method, {}))
    assert [name for name in names if name in own] != []


@pytest.mark.parametrize(
    ("method", "body"), [(method, body) for method, bodies in MAKE.items() for body in bodies]
)
def test_nothing_is_made_from_what_others_have(
    place: Place, method: str, body: dict[str, Any]
) -> None:
    nobodys = strangers(place)
    theirs = place.rpc(place.red, method, filled(body, place.names))
    none = place.rpc(place.red, method, filled(body, nobodys))
    assert theirs["error"]["data"]["code"] == "not_found", theirs
    assert told(json.dumps(theirs), place.names) == told(json.dumps(none), nobodys)


@pytest.mark.parametrize("method", OF_ADMINS)
def test_what_is_the_operators_takes_an_admin(place: Place, method: str) -> None:
    answer = place.rpc(place.red, method, params_of(method, place.names))
    assert answer["error"]["data"]["code"] == "forbidden"
    assert "scope admin" in answer["error"]["message"]


@pytest.mark.parametrize("path", [route.path for route in SOCKETS])
def test_a_socket_knows_nothing_of_what_others_have(place: Place, path: str) -> None:
    nobodys = strangers(place)
    theirs, none = (refusal(place, named(path, names)) for names in (place.names, nobodys))
    assert theirs[0] == none[0] == 404
    assert told(theirs[1], place.names) == told(none[1], nobodys)


def refusal(place: Place, path: str) -> tuple[int, str]:
    headers = {"Authorization": place.red.headers["Authorization"]}
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{place.server.port}{path}", additional_headers=headers, proxy=None)
    response = refused.value.response
    return response.status_code, response.body.decode()


def test_no_spelling_of_an_id_helps(place: Place) -> None:
    box = place.box
    for spelling in (
        box.upper(),
        f"{box}%00",
        f"%2e/{box}",
        "".join(f"%{ord(c):02x}" for c in box),
        f"{box}/",
        f"/{box}",
        f"x/../{box}",
        quote(box, safe="") + "%20",
        f"{box}?tenant=blue",
    ):
        answer = place.red.get(f"/v1/sandboxes/{spelling}")
        assert answer.status_code == 404, spelling
        assert "created_at" not in answer.text


def test_what_is_over_was_never_there_for_others(place: Place) -> None:
    made = place.blue.post("/v1/sandboxes", json={"template": "bash"}).json()["id"]
    place.blue.delete(f"/v1/sandboxes/{made}").raise_for_status()
    assert place.blue.get(f"/v1/sandboxes/{made}").status_code == 410
    theirs = place.red.get(f"/v1/sandboxes/{made}")
    none = place.red.get(f"/v1/sandboxes/{NOBODYS}")
    assert theirs.status_code == none.status_code == 404
    assert theirs.text.replace(made, NOBODYS) == none.text


def test_names_are_each_tenants_own(place: Place) -> None:
    assert place.red.post("/v1/volumes", json={"name": "bluevolume"}).status_code == 201
    assert place.red.post("/v1/volumes", json={"name": "bluevolume"}).status_code == 409
    assert len(place.red.get("/v1/volumes").json()["volumes"]) == 1
    mount = {"name": "bluevolume", "path": "/workspace/data"}
    made = place.red.post("/v1/sandboxes", json={"template": "bash", "volumes": [mount]}).json()
    kept = place.red.post(f"/v1/sandboxes/{made['id']}/snapshots", json={"name": "bluesnapshot"})
    assert kept.status_code == 201, kept.text
    place.red.delete(f"/v1/sandboxes/{made['id']}").raise_for_status()
    place.red.delete("/v1/snapshots/bluesnapshot").raise_for_status()
    place.red.delete("/v1/volumes/bluevolume").raise_for_status()
    assert place.blue.get("/v1/volumes/bluevolume").status_code == 200
    assert place.blue.get("/v1/snapshots/bluesnapshot").status_code == 200


def test_a_session_and_its_files_are_its_tenants(place: Place) -> None:
    """Also when it is closed, which keeps its files as a snapshot, and opened again."""
    body = {"session_id": "bluesession", "environment": "bash"}
    made = place.admin.post("/api/sessions", json=body)
    assert made.status_code == 201, made.text
    write = {"session_id": "bluesession", "path": "a", "content": "not blue"}
    place.admin.post("/api/e2b/files", json=write).raise_for_status()
    place.admin.post("/api/sessions/bluesession/close").raise_for_status()
    assert place.blue.get("/api/sessions/bluesession").json()["state"] == "open"
    place.admin.post("/api/sessions/bluesession/reopen").raise_for_status()
    read = place.admin.get("/api/e2b/files/bluesession", params={"path": "a"})
    assert read.json()["content"] == "not blue"
    assert place.blue.get("/api/e2b/files/bluesession", params={"path": "a"}).status_code == 404
    place.admin.delete("/api/sessions/bluesession").raise_for_status()
    assert place.admin.get("/v1/snapshots").json()["snapshots"] == []
    assert place.blue.get("/api/sessions/bluesession").status_code == 200


def test_a_playgrounds_session_id_is_each_tenants_own(place: Place) -> None:
    body = {"sessionId": "blueplayground", "template": "bash"}
    made = place.red.post("/api/playground/container", json=body).json()
    assert made["existing"] is False
    again = place.blue.post("/api/playground/container", json=body).json()
    assert again["existing"] is True and again["containerId"] != made["containerId"]
    query = {"sessionId": "blueplayground"}
    place.red.delete("/api/playground/container", params=query).raise_for_status()
    assert place.blue.get("/api/playground/container", params=query).status_code == 200


def test_an_idempotency_key_is_each_tenants_own(place: Place) -> None:
    made = [
        who.post("/v1/sandboxes", json={"template": "bash"}, headers={"Idempotency-Key": "k1"})
        for who in (place.blue, place.red, place.blue, place.admin)
    ]
    ids = [answer.json()["id"] for answer in made]
    assert ids[0] == ids[2] and len(set(ids)) == 3
    for who, id in zip((place.blue, place.red, place.admin), (*ids[:2], ids[3]), strict=True):
        who.delete(f"/v1/sandboxes/{id}").raise_for_status()


def test_a_tenants_template_is_used_under_its_own_name(place: Place) -> None:
    listed = {each["name"] for each in place.blue.get("/v1/templates").json()["templates"]}
    assert {"bluesown", "python"} <= listed
    made = place.blue.post("/v1/sandboxes", json={"template": "bluesown"})
    assert made.status_code == 201, made.text
    assert made.json()["template"] == "bluesown" and made.json()["tenant"] == "blue"
    id = made.json()["id"]
    ran = place.blue.post(f"/v1/sandboxes/{id}/execs", json={"cmd": "echo $0"})
    assert ran.json()["exit_code"] == 0
    (copy,) = place.blue.post(f"/v1/sandboxes/{id}/fork", json={}).json()["sandboxes"]
    assert copy["template"] == "bluesown" and copy["tenant"] == "blue"
    for each in (id, copy["id"]):
        place.blue.delete(f"/v1/sandboxes/{each}").raise_for_status()
    assert place.blue.get(f"/v1/templates/{inner('blue', 'bluesown')}").status_code == 404


def test_what_is_everybodys_takes_an_admin_to_change(place: Place) -> None:
    refused = place.blue.delete("/v1/templates/python")
    assert refused.status_code == 403 and "scope admin" in refused.text
    refused = place.blue.post("/v1/templates/python/build", content=b"x")
    assert refused.status_code == 409 and "everybody" in refused.text


def test_an_admin_may_name_another_tenant(place: Place) -> None:
    listed = place.admin.get("/v1/sandboxes", params={"tenant": "blue"}).json()["sandboxes"]
    assert place.box in [each["id"] for each in listed]
    everything = place.admin.get("/v1/sandboxes", params={"tenant": "*"}).json()["sandboxes"]
    assert {"blue"} <= {each["tenant"] for each in everything}
    assert place.box not in place.admin.get("/v1/sandboxes").text
    for wanted in ("blue", "*"):
        refused = place.red.get("/v1/sandboxes", params={"tenant": wanted})
        assert refused.status_code == 403
    acting = {"X-Capsule-Tenant": "blue"}
    assert place.admin.get(f"/v1/sandboxes/{place.box}").status_code == 404
    assert place.admin.get(f"/v1/sandboxes/{place.box}", headers=acting).status_code == 200
    assert place.red.get(f"/v1/sandboxes/{place.box}", headers=acting).status_code == 403
    assert place.red.get("/v1/sandboxes", headers={"X-Capsule-Tenant": "red"}).status_code == 200
    odd = place.admin.get("/v1/sandboxes", headers={"X-Capsule-Tenant": "a/b"})
    assert odd.status_code == 400


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
