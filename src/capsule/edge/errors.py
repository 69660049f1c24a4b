"""The one place where an error becomes an answer.

Over HTTP it is `{"error": {"code", "message", "hint"?, "details"?}}` with the status of its
class, over JSON-RPC the same object is `error.data`, with the class's number as `error.code`. An
exception nobody meant to raise is logged with an id, and the client learns only that id.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from capsule.errors import CapacityError, CapsuleError, InternalError, InvalidError

log = logging.getLogger("capsule.edge")

JSON_HEADERS = [(b"content-type", b"application/json")]


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


def http_body(error: CapsuleError) -> bytes:
    return encode({"error": told(error)})


def http_headers(error: CapsuleError, body: bytes) -> list[tuple[bytes, bytes]]:
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(body))]
    if (seconds := retry_after(error)) is not None:
        headers.append((b"retry-after", seconds))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, HttpError):
        headers += [(name.lower().encode(), text.encode()) for name, text in error.headers.items()]
    return headers


def retry_after(error: CapsuleError) -> bytes | None:
    if isinstance(error, CapacityError):
        return b"%d" % max(1, math.ceil(error.retry_after))
    return b"1" if error.http_status == 503 else None


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
    body = http_body(error)
    prefix = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    await send(
        {
            "type": f"{prefix}.start",
            "status": error.http_status,
            "headers": http_headers(error, body),
        }
    )
    await send({"type": f"{prefix}.body", "body": body})


class Answer:
    """A `send` that knows whether the answer has begun: if not, an error can still become one."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)


def invalid_field(field: str, problem: str, *, hint: str | None = None) -> InvalidError:
    return InvalidError(f"{field}: {problem}", hint=hint, field=field)
