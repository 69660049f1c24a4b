"""The examples of section 7 of the JSON-RPC 2.0 specification, word for word."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from capsule.edge.rpc import Method, Rpc
from capsule.service.caller import OPERATOR, Caller, KeyScope


class Operands(msgspec.Struct):
    minuend: int
    subtrahend: int


async def subtract(caller: Caller, params: list[int] | Operands) -> int:
    if isinstance(params, Operands):
        return params.minuend - params.subtrahend
    return params[0] - params[1]


async def add(caller: Caller, params: list[int]) -> int:
    return sum(params)


async def get_data(caller: Caller, params: Any) -> list[Any]:
    return ["hello", 5]


async def ignore(caller: Caller, params: Any) -> None:
    pass


METHODS = {
    "subtract": Method(list[int] | Operands, subtract),
    "sum": Method(list[int], add),
    "get_data": Method(Any, get_data),
    "update": Method(Any, ignore),
    "notify_hello": Method(Any, ignore),
    "notify_sum": Method(Any, ignore),
}
RPC = Rpc(METHODS, dict.fromkeys(METHODS, KeyScope.RUN))


def result(value: Any, id: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "result": value, "id": id}


def error(code: int, message: str, id: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "error": {"code": code, "message": message}, "id": id}


INVALID, UNPARSED = error(-32600, "Invalid Request"), error(-32700, "Parse error")
BATCH = """[
    {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
    {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
    {"jsonrpc": "2.0", "method": "subtract", "params": [42,23], "id": "2"},
    {"foo": "boo"},
    {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
    {"jsonrpc": "2.0", "method": "get_data", "id": "9"}
]"""
BATCH_OF_INVALID_JSON = """[
  {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
  {"jsonrpc": "2.0", "method"
]"""
BATCH_OF_NOTIFICATIONS = """[
    {"jsonrpc": "2.0", "method": "notify_sum", "params": [1,2,4]},
    {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]}
]"""
NAMED = '{"jsonrpc": "2.0", "method": "subtract", "params": {%s}, "id": 3}'
EXAMPLES: list[tuple[str, Any]] = [
    ('{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}', result(19, 1)),
    ('{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}', result(-19, 2)),
    (NAMED % '"subtrahend": 23, "minuend": 42', result(19, 3)),
    (NAMED % '"minuend": 42, "subtrahend": 23', result(19, 3)),
    ('{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}', None),
    ('{"jsonrpc": "2.0", "method": "foobar"}', None),
    ('{"jsonrpc": "2.0", "method": "foobar", "id": "1"}', error(-32601, "Method not found", "1")),
    ('{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', UNPARSED),
    ('{"jsonrpc": "2.0", "method": 1, "params": "bar"}', INVALID),
    (BATCH_OF_INVALID_JSON, UNPARSED),
    ("[]", INVALID),
    ("[1]", [INVALID]),
    ("[1,2,3]", [INVALID] * 3),
    (
        BATCH,
        [
            result(7, "1"),
            result(19, "2"),
            INVALID,
            error(-32601, "Method not found", "5"),
            result(["hello", 5], "9"),
        ],
    ),
    (BATCH_OF_NOTIFICATIONS, None),
]


@pytest.mark.parametrize(("request_text", "expected"), EXAMPLES)
async def test_an_example_of_the_specification(request_text: str, expected: Any) -> None:
    body, _ = await RPC.answer(request_text.encode(), OPERATOR)
    assert (without_data(json.loads(body)) if body else None) == expected


def without_data(answer: Any) -> Any:
    """Without the part of an error that the specification leaves to the server."""
    if isinstance(answer, list):
        return [without_data(one) for one in answer]
    if "error" in answer:
        answer["error"].pop("data", None)
    return answer
