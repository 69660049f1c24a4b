"""The client when the server refuses, does not answer, or answers with garbage."""

from __future__ import annotations

from typing import Any

import pytest

import capsule_sdk.errors
from capsule_sdk import (
    CapacityError,
    CapsuleClient,
    CapsuleError,
    InvalidError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from tests.sdk.crooked import answer, crooked_server, error, hang_up, result
from tests.support import free_port

SANDBOX = {
    "id": "abc12345",
    "template": "python",
    "created_at": "2024-01-19T10:00:00Z",
    "expires_at": "2024-01-19T10:10:00Z",
}
EXEC = {"stdout": "hi\n", "stderr": "", "exit_code": 0, "timed_out": False, "duration_ms": 4}


def test_an_error_of_the_server_is_raised_as_its_class() -> None:
    unknown = capsule_sdk.errors.from_json({"code": "from_the_future", "message": "well"})
    assert type(unknown) is CapsuleError
    assert (unknown.code, str(unknown)) == ("from_the_future", "well")
    with crooked_server(error("not_found", "no such sandbox: x", hint="list them")) as server:
        with pytest.raises(NotFoundError, match="no such sandbox: x; hint: list them"):
            CapsuleClient(server.url).get("x")
        assert len(server.requests) == 1


def test_a_server_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError, match="capsule serve") as caught:
        CapsuleClient(url, retries=1).list()
    assert url in str(caught.value)


def test_create_is_repeated_with_the_same_key_when_the_answer_is_lost() -> None:
    with crooked_server(hang_up, result(SANDBOX)) as server:
        assert CapsuleClient(server.url).create("python").id == "abc12345"
        keys = [request.json["params"]["idempotency_key"] for request in server.requests]
        assert len(keys) == 2
        assert keys[0] == keys[1]


def test_exec_is_repeated_with_the_same_key_when_the_answer_is_lost() -> None:
    with crooked_server(
        result(SANDBOX), hang_up, result(EXEC | {"reason": "exited"}), hang_up
    ) as server:
        capsule = CapsuleClient(server.url).get("abc12345")
        assert capsule.run("print('hi')").stdout == "hi\n"
        keys = [request.json["params"]["idempotency_key"] for request in server.requests[1:]]
        assert len(keys) == 2
        assert keys[0] == keys[1]
        with pytest.raises(UnavailableError):
            capsule.send_input("e1", "once")  # input is never sent twice
        assert len(server.requests) == 4


def test_a_key_of_the_caller_is_used_and_none_is_no_key() -> None:
    done = result(EXEC | {"reason": "exited"})
    with crooked_server(result(SANDBOX), done, done, result(SANDBOX)) as server:
        client = CapsuleClient(server.url)
        capsule = client.get("abc12345")
        capsule.exec(["true"], idempotency_key="mine")
        capsule.exec(["true"], idempotency_key=None)
        client.create(idempotency_key=None)
        keys = [request.json["params"]["idempotency_key"] for request in server.requests[1:]]
        assert keys[0] == "mine"
        assert all(keys)
        assert len(set(keys)) == 3


def test_retries_are_bounded() -> None:
    with crooked_server(hang_up, hang_up, hang_up, result(SANDBOX)) as server:
        with pytest.raises(UnavailableError):
            CapsuleClient(server.url, retries=2).create("python")
        assert len(server.requests) == 3


def test_a_full_server_is_asked_again_and_then_a_capacity_error() -> None:
    full = error("capacity", "full", details={"retry_after": 0.05})
    with crooked_server(full, full, result(SANDBOX)) as server:
        assert CapsuleClient(server.url).create().id == "abc12345"
    with crooked_server(full, full) as server:
        with pytest.raises(CapacityError) as caught:
            CapsuleClient(server.url, retries=1).create()
        assert caught.value.retry_after == 0.05


def test_an_answer_that_is_no_json_rpc() -> None:
    body = {"error": {"code": "unauthenticated", "message": "no API key", "hint": "send one"}}
    page = answer(b"<h1>502 Bad Gateway</h1>", status=502)
    with crooked_server(answer(body, status=401), page) as server:
        with pytest.raises(UnauthenticatedError, match="no API key") as caught:
            CapsuleClient(server.url).get("x")
        with pytest.raises(UnavailableError, match="502"):
            CapsuleClient(server.url, retries=0).get("x")
        assert caught.value.hint == "give one as api_key=…, or set CAPSULE_API_KEY"


def test_the_key_is_sent_and_defaults_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSULE_API_KEY", "from-the-environment")
    with crooked_server(result(SANDBOX), result(SANDBOX)) as server:
        monkeypatch.setenv("CAPSULE_URL", server.url)
        CapsuleClient().get("x")
        CapsuleClient(api_key="given").get("x")
        sent = [request.headers["authorization"] for request in server.requests]
        assert sent == ["Bearer from-the-environment", "Bearer given"]


@pytest.mark.parametrize(
    "url",
    ["localhost:8080", "ftp://x", "http://", "nonsense", "http://[::1", "http://h:99999", 3,
     "http://host/?query"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_at_once(url: Any) -> None:
    with pytest.raises(InvalidError, match="address"):
        CapsuleClient(url)


def test_fields_of_a_newer_server_are_ignored() -> None:
    with crooked_server(result(SANDBOX | {"orbit": "low"})) as server:
        assert CapsuleClient(server.url).get("abc12345").info.template == "python"
