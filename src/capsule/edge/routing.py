"""How a REST route is written: FastAPI finds it, checks its query and documents it; bodies and
answers are msgspec's.

A route returns a finished `Response`, so nothing is validated or encoded twice, and every
exception becomes an answer in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.errors import (
    encode,
    http_body,
    http_headers,
    invalid_field,
    is_e2b,
    status_of,
    understand,
)
from capsule.errors import CapsuleError, InvalidError
from capsule.settings import brief

REF = "#/components/schemas/{name}"
Described = set[Any]  # the types whose schemas the document needs


class Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return failure(_of_fastapi(error), e2b=is_e2b(request.scope))
            except Exception as error:  # the edge: whatever it is becomes an answer
                return failure(understand(error), e2b=is_e2b(request.scope))

        return answer


def failure(error: CapsuleError, *, e2b: bool = False) -> Response:
    body = http_body(error, e2b=e2b)
    response = Response(body, status_code=status_of(error, e2b=e2b))
    response.raw_headers = http_headers(error, body, e2b=e2b)
    return response


def reply(view: Any, status: int = 200) -> Response:
    return Response(encode(view), status_code=status, media_type="application/json")


def _of_fastapi(error: RequestValidationError) -> InvalidError:
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"][1:])
    problem = first["msg"][:1].lower() + first["msg"][1:]
    return invalid_field(where, f"{problem}, got {brief(first.get('input'))}")


def describe(
    types: Described,
    *,
    body: Any = None,
    raw_body: str | None = None,
    returns: Any = None,
    raw: str | None = None,
    status: int = 200,
    error: Any = None,
) -> dict[str, Any]:
    """The keyword arguments of a route's decorator that document it.

    `body` and `returns` are JSON, as types; `raw_body` and `raw` are media types of bytes.
    """
    extra: dict[str, Any] = {}
    content = _content(types, body, raw_body)
    if content:
        extra["requestBody"] = {"required": raw_body is not None, "content": content}
    ok: dict[str, Any] = {"description": "done", "content": _content(types, returns, raw)}
    shape = error or ErrorView
    failed = {"description": "an error", "content": _content(types, shape, None)}
    return {
        "response_model": None,
        "status_code": status,
        "responses": {status: ok, "4XX": failed, "5XX": failed},
        "openapi_extra": extra,
    }


def _content(types: Described, shape: Any, media: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if shape is not None:
        types.add(shape)
        content["application/json"] = {"schema": {"$ref": REF.format(name=shape.__name__)}}
    if media is not None:
        content[media] = {} if media in _SHAPELESS else {"schema": _BYTES}
    return content


_BYTES = {"type": "string", "format": "binary"}
# JSON of any shape, and events, which OpenAPI has no words for.
_SHAPELESS = frozenset({"application/json", "text/event-stream"})


class ErrorBody(msgspec.Struct):
    code: str
    message: str
    hint: str | None = None
    details: dict[str, Any] = {}


class ErrorView(msgspec.Struct):
    error: ErrorBody


def add_schemas(document: dict[str, Any], types: Described) -> None:
    """Put the schemas of `types` and all they refer to into an OpenAPI document."""
    ordered = sorted(types, key=lambda shape: str(shape.__name__))
    _, components = msgspec.json.schema_components(ordered, ref_template=REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(components)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
