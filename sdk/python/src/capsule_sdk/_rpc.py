"""One call: encode, send, retry where that is safe, and turn an error into its class."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ._arguments import brief, name_as_given
from ._flow import Answer, Call, Flow, Handle, Read, Sleep
from .errors import (
    CapacityError,
    CapsuleError,
    InvalidError,
    UnauthenticatedError,
    UnavailableError,
    from_json,
)

T = TypeVar("T")

LARGEST_ERROR = 64 * 1024
LONGEST_WAIT = 10.0  # before one more try, whatever the server asks for
JSON_HEADERS = {"Content-Type": "application/json"}
_STATUS_CODES = {400: "invalid", 401: "unauthenticated", 403: "forbidden", 404: "not_found",
                 409: "conflict", 410: "gone", 413: "too_large", 429: "capacity",
                 501: "unsupported", 503: "unavailable", 507: "no_space"}  # fmt: skip


def new_key() -> str:
    """A fresh idempotency key: with it, a repeated call is answered, not done again."""
    return secrets.token_hex(16)


def rpc(
    method: str,
    params: Mapping[str, Any],
    *,
    retries: int,
    timeout: float | None = None,
    repeatable: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> Flow[Any]:
    """`repeatable`: doing it twice is the same as once, because of its nature or a key.

    `arguments` is what the caller gave, under the caller's names; else it is `params`.
    """
    named = params if arguments is None else arguments
    given = {key: value for key, value in params.items() if value is not None}
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": given}
    call = Call("POST", "/rpc", to_json(request, named), JSON_HEADERS, timeout)
    once = persist(lambda: _ask(call), retries=retries, repeatable=repeatable)
    return naming(once, named)


def _ask(call: Call) -> Flow[Any]:
    answer: Answer = yield call
    return _result(answer)


def naming(flow: Flow[T], arguments: Mapping[str, Any]) -> Flow[T]:
    """The same flow, whose errors name what the caller gave."""
    try:
        return (yield from flow)
    except CapsuleError as error:
        name_as_given(error, arguments)
        raise


def persist(once: Callable[[], Flow[T]], *, retries: int, repeatable: bool) -> Flow[T]:
    """Do it at most 1 + retries times: again when the server could not be reached or is full."""
    for left in range(retries, -1, -1):
        try:
            return (yield from once())
        except UnavailableError as error:
            if not left or (error.sent and not repeatable):
                raise
            wait = 0.1 * 2.0 ** (retries - left)
        except CapacityError as error:
            if not left:
                raise
            wait = error.retry_after
        yield Sleep(min(max(wait, 0.05), LONGEST_WAIT))
    raise AssertionError("unreachable")


def to_json(body: Any, arguments: Mapping[str, Any]) -> bytes:
    """Raises InvalidError that names the argument which cannot be sent."""
    try:
        return _dump(body).encode()
    except (TypeError, ValueError, RecursionError) as error:
        for name, value in arguments.items():
            if not _is_json(value):
                raise InvalidError(
                    f"{name}={brief(value)} is not JSON: {error}", field=name, value=value
                ) from error
        raise InvalidError(f"the arguments are not JSON: {error}") from error


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _is_json(value: Any) -> bool:
    try:
        _dump(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _result(answer: Answer) -> Any:
    if answer.status != 200:  # refused before it was looked at as JSON-RPC
        raise failure(answer)
    body = parse(answer)
    error = body.get("error")
    if not isinstance(error, Mapping):
        return body.get("result")
    data = error.get("data")
    if isinstance(data, Mapping) and "code" in data:
        raise from_json({"message": error.get("message"), **data})
    raise InvalidError(str(error.get("message")), rpc_code=error.get("code"))


def parse(answer: Answer) -> dict[str, Any]:
    """The answer's JSON object; a proxy's HTML page is not one, and says nothing of the sandbox."""
    try:
        body = json.loads(answer.body)
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    raise UnavailableError(
        f"the server answered with HTTP {answer.status} and no JSON",
        hint="check that CAPSULE_URL names a Capsule server",
    )


def failure(answer: Answer) -> CapsuleError:
    """The exception for a REST answer that is not a success."""
    body = parse(answer).get("error")
    if not isinstance(body, Mapping):
        code = _STATUS_CODES.get(answer.status, "internal")
        body = {"code": code, "message": f"the server answered with HTTP {answer.status}"}
    error = from_json(body)
    if isinstance(error, UnauthenticatedError):
        error.hint = "give one as api_key=…, or set CAPSULE_API_KEY"  # not by hand, in a header
    return error


def accepted(handle: Handle) -> Flow[None]:
    """Go on if the server said yes; otherwise read its reason and raise it."""
    if handle.status < 300:
        return
    body = b""
    while chunk := (yield Read(handle)):
        body += chunk
        if len(body) > LARGEST_ERROR:
            break
    raise failure(Answer(handle.status, handle.headers, body))
