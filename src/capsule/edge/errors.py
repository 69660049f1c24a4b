"""The one place where an error becomes an answer.

Over HTTP it is `{"error": {"code", "message", "hint"?, "details"?}}` with the status of its
class, over JSON-RPC the same object is `error.data`, with the class's number as `error.code`. At
the paths of E2B's API, and for its SDKs anywhere, it is `{"code": status, "message"}`, as they read
it. An exception nobody meant to raise is logged with an id, and the client learns only that id.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from capsule.errors import CapacityError, CapsuleError, GoneError, InternalError, InvalidError

log = logging.getLogger("capsule.edge")

JSON_HEADERS = [(b"content-type", b"application/json")]
MAX_PATIENCE = 5  # seconds that an SDK of E2B is asked to wait before it asks a full server again
_E2B = re.compile(
    r"/+(v[23]/|(sandboxes|templates|snapshots|volumes|volumecontent|secrets|default-templates)(/|$))"
)


class HttpError(CapsuleError):
    """What only HTTP knows: a method that a path does not have, a media type, a slow body."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.http_status = status  # type: ignore[misc]  # one class for the few codes of HTTP itself
        self.code = code  # type: ignore[misc]  # as above
        self.headers = headers or {}


class RateError(CapacityError):
    """There is room, but who asks has asked too often."""


def understand(error: BaseException) -> CapsuleError:
    """What the client gets to know of `error`. Logs it when it is a bug of ours."""
    if isinstance(error, CapsuleError):
        return _in_millis(error.details) if error.details.get("unit") == "seconds" else error
    if isinstance(error, HTTPException):
        text = str(error.detail).replace("\n", " ")
        return HttpError(error.status_code, "invalid", text, headers=error.headers)
    incident = secrets.token_hex(6)
    log.error("incident %s: %r", incident, error, exc_info=error)
    return InternalError(
        f"internal error, incident {incident}",
        hint="the server's log has the cause under this id",
        incident=incident,
    )


def sentence(error: CapsuleError) -> str:
    """All of it for a person, where there is no field for the hint."""
    return f"{error.message}; {error.hint}" if error.hint else error.message


def _in_millis(found: Mapping[str, Any]) -> InvalidError:
    """Inside, times are seconds; clients write whole milliseconds, in fields that say so."""
    field = f"{found['field']}_ms"
    value, least, most = (round(found[name] * 1000) for name in ("value", "least", "most"))
    return invalid_field(field, f"{value} is out of range, allowed: {least} to {most}")


def wrong_method(method: str, allowed: Sequence[str]) -> HttpError:
    named = ", ".join(allowed)
    text = f"method {method[:20]} is not for this path, allowed: {named}"
    return HttpError(405, "invalid", text, headers={"allow": named})


def told(error: CapsuleError) -> dict[str, Any]:
    """The error as clients see it. A line break in a name they sent must not become one of ours."""
    body = error.to_json()
    for field in ("message", "hint"):
        if field in body:
            body[field] = one_line(body[field])
    return body


def one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def is_e2b(scope: Scope) -> bool:
    """Is the client one of E2B's?"""
    if _E2B.match(scope["path"]) is not None:
        return True
    return any(
        name == b"e2b-sandbox-id" or (name == b"user-agent" and value.startswith(b"e2b-"))
        for name, value in scope["headers"]
    )


def status_of(error: CapsuleError, *, e2b: bool = False) -> int:
    """E2B's SDKs know no 410 and no 501, and a 429 is for who asks too often."""
    if not e2b:
        return error.http_status
    if isinstance(error, GoneError):
        return 404
    if isinstance(error, CapacityError) and not isinstance(error, RateError):
        return 503
    return 400 if error.http_status == 501 else error.http_status


def http_body(error: CapsuleError, *, e2b: bool = False) -> bytes:
    body = told(error)
    if not e2b:
        return encode({"error": body})
    message = f"{body['message']}; {body['hint']}" if "hint" in body else body["message"]
    return encode({"code": status_of(error, e2b=True), "message": message})


def http_headers(
    error: CapsuleError, body: bytes, *, e2b: bool = False
) -> list[tuple[bytes, bytes]]:
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(body))]
    if (seconds := retry_after(error)) is not None:
        if e2b and not isinstance(error, RateError):
            seconds = min(seconds, MAX_PATIENCE)
        headers.append((b"retry-after", b"%d" % seconds))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, HttpError):
        headers += [(name.lower().encode(), text.encode()) for name, text in error.headers.items()]
    return headers


def retry_after(error: CapsuleError) -> int | None:
    if isinstance(error, CapacityError):
        return max(1, math.ceil(error.retry_after))
    return 1 if error.http_status == 503 else None


def rpc_error(error: CapsuleError) -> dict[str, Any]:
    body = told(error)
    return {"code": error.rpc_code, "message": body["message"], "data": body}


def encode(value: Any) -> bytes:
    """JSON that always succeeds: a lone surrogate in a message or a name must not become a 500."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_readable(msgspec.to_builtins(value)))


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    return value


async def send_error(scope: Scope, receive: Receive, send: Send, error: CapsuleError) -> None:
    """Answer a request, or refuse a WebSocket before it is accepted, with `error`."""
    e2b = is_e2b(scope)
    body = http_body(error, e2b=e2b)
    prefix = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    await send(
        {
            "type": f"{prefix}.start",
            "status": status_of(error, e2b=e2b),
            "headers": http_headers(error, body, e2b=e2b),
        }
    )
    await send({"type": f"{prefix}.body", "body": body})


class Answer:
    """A `send` that knows whether the answer has begun (if not, an error can still become one) and
    whether it is complete."""

    def __init__(self, send: Send) -> None:
        self.begun = self.over = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)
        self.over = message["type"] == "http.response.body" and not message.get("more_body")


def invalid_field(field: str, problem: str, *, hint: str | None = None) -> InvalidError:
    return InvalidError(f"{field}: {problem}", hint=hint, field=field)
