"""The OpenAPI description against the server: schemathesis makes requests from it, right ones and
wrong ones, and every answer must be one that it documents. None is a 500."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok
from schemathesis.generation.hypothesis import builder
from schemathesis.pytest.lazy import get_all_tests

from tests.support import ROOT
from tests.support.servers import real_server

pytestmark = pytest.mark.real

KEY = "correct-horse-battery-staple"
HEADERS = {"Authorization": f"Bearer {KEY}"}
# One that never ends by itself, one that an Engine would have to carry out.
LEFT_OUT = r"/watch$|/build$"

load_all_checks()
CHECKED: list[Any] = CHECKS.get_by_names(
    ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)


@dataclass(frozen=True, slots=True)
class Place:
    url: str
    names: dict[str, str]  # what there really is, by the word that paths have for it
    http: requests.Session  # thousands of connections would be most of the work


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with real_server(API_KEYS=KEY, MAX_SANDBOXES="20", LOG_LEVEL="error") as server:
        with httpx.Client(verify=False, base_url=server.url, headers=HEADERS, timeout=30) as http:
            body = {"template": "bash", "checkpoint": "each", "ttl_ms": 600_000}
            box = http.post("/v1/sandboxes", json=body).json()["id"]
            ran = http.post(f"/v1/sandboxes/{box}/execs", json={"cmd": "echo 1 > file"}).json()
            http.post("/v1/volumes", json={"name": "data"}).raise_for_status()
            hook = http.post("/v1/webhooks", json={"url": "https://nobody.invalid/"}).json()
            session = http.post("/api/sessions", json={"environment": "bash"}).json()
        names = {
            "id": box,
            "exec_id": ran["exec_id"],
            "path": "workspace/file",
            "session_id": session["session_id"],
            "webhook_id": hook["webhook_id"],
        }
        with requests.Session() as session:
            session.trust_env = False
            yield Place(server.url, names, session)


@schemathesis.serializer("application/x-tar")
def no_archive(_: object, value: object) -> bytes:
    """Bytes that are none, which is what archives are tried with here."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


DESCRIPTION = json.loads((ROOT / "spec" / "openapi.json").read_text())
# The most arguments, each of the greatest length, would be 32 MB: no request may be that long.
DESCRIPTION["components"]["schemas"]["E2bStep"]["properties"]["args"]["maxItems"] = 16
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
VERBS = frozenset({"get", "put", "post", "delete", "patch", "head", "options"})
OPERATIONS = [
    pytest.param(verb, path, id=f"{verb.upper()} {path}")
    for path, verbs in DESCRIPTION["paths"].items()
    for verb in verbs
    if verb in VERBS and not re.search(LEFT_OUT, path)
]
UNTRIED = (
    builder.InvalidHeadersExampleMark,
    builder.InvalidRegexMark,
    builder.MissingPathParameters,
    builder.NonSerializableMark,
    builder.UnsatisfiableExampleMark,
    builder.UnserializablePayloadMark,
)


@pytest.mark.parametrize(("verb", "path"), OPERATIONS)
def test_every_answer_is_one_that_is_documented(verb: str, path: str, place: Place) -> None:
    """Its requests are made when the test runs. `schema.parametrize()` would make all of them while
    tests are looked for, in every process that looks: in 13 seconds, and 1.8 GB.
    """

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    def answered(case: Case[Any]) -> None:
        assert_documented(case, place)

    schema = SCHEMA.include(path=path, method=verb.upper())
    (made,) = get_all_tests(schema=schema, test_func=answered, settings=None, given_kwargs=None)
    assert isinstance(made, Ok), made
    _, tries = made.ok()
    tries()
    assert [mark for mark in UNTRIED if mark.is_set(tries)] == []


def assert_documented(case: Case[Any], place: Place) -> None:
    """Half of the requests name what there is: of the rest most would end with a 404."""
    if case.method != "DELETE" and hash(str(case.body)) % 2:
        for word, name in place.names.items():
            if word in (case.path_parameters or {}):
                case.path_parameters[word] = name
    response = case.call(base_url=place.url, session=place.http, headers=HEADERS, timeout=20)
    assert response.status_code != 500, response.text
    case.validate_response(response, checks=CHECKED)
