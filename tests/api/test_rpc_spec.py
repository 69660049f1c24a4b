"""Every example of section 7 of the JSON-RPC 2.0 specification, word for word."""

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


async def ask(request: str) -> Any:
    """The answer without the parts of an error that the specification leaves to the server."""
    body, _ = await RPC.answer(request.encode(), OPERATOR)
    return without_data(json.loads(body)) if body else None


def without_data(answer: Any) -> Any:
    if isinstance(answer, list):
        return [without_data(one) for one in answer]
    if "error" in answer:
        answer["error"].pop("data", None)
    return answer


@pytest.mark.parametrize(
    ("request_text", "expected"),
    [
        (
            '{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}',
            {"jsonrpc": "2.0", "result": 19, "id": 1},
        ),
        (
            '{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}',
            {"jsonrpc": "2.0", "result": -19, "id": 2},
        ),
    ],
)
async def test_positional_parameters(request_text: str, expected: Any) -> None:
    assert await ask(request_text) == expected


@pytest.mark.parametrize(
    ("request_text", "expected"),
    [
        (
            '{"jsonrpc": "2.0", "method": "subtract", '
            '"params": {"subtrahend": 23, "minuend": 42}, "id": 3}',
            {"jsonrpc": "2.0", "result": 19, "id": 3},
        ),
        (
            '{"jsonrpc": "2.0", "method": "subtract", '
            '"params": {"minuend": 42, "subtrahend": 23}, "id": 4}',
            {"jsonrpc": "2.0", "result": 19, "id": 4},
        ),
    ],
)
async def test_named_parameters(request_text: str, expected: Any) -> None:
    assert await ask(request_text) == expected


@pytest.mark.parametrize(
    "request_text",
    [
        '{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}',
        '{"jsonrpc": "2.0", "method": "foobar"}',
    ],
)
async def test_a_notification_is_not_answered(request_text: str) -> None:
    assert await ask(request_text) is None


async def test_call_of_a_method_that_does_not_exist() -> None:
    assert await ask('{"jsonrpc": "2.0", "method": "foobar", "id": "1"}') == {
        "jsonrpc": "2.0",
        "error": {"code": -32601, "message": "Method not found"},
        "id": "1",
    }


async def test_call_with_invalid_json() -> None:
    assert await ask('{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]') == {
        "jsonrpc": "2.0",
        "error": {"code": -32700, "message": "Parse error"},
        "id": None,
    }


async def test_call_with_an_invalid_request() -> None:
    assert await ask('{"jsonrpc": "2.0", "method": 1, "params": "bar"}') == invalid_request()


async def test_batch_of_invalid_json() -> None:
    text = """[
  {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
  {"jsonrpc": "2.0", "method"
]"""
    assert await ask(text) == {
        "jsonrpc": "2.0",
        "error": {"code": -32700, "message": "Parse error"},
        "id": None,
    }


async def test_empty_batch() -> None:
    assert await ask("[]") == invalid_request()


async def test_invalid_but_not_empty_batch() -> None:
    assert await ask("[1]") == [invalid_request()]


async def test_invalid_batch() -> None:
    assert await ask("[1,2,3]") == [invalid_request()] * 3


async def test_batch() -> None:
    text = """[
        {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
        {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
        {"jsonrpc": "2.0", "method": "subtract", "params": [42,23], "id": "2"},
        {"foo": "boo"},
        {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
        {"jsonrpc": "2.0", "method": "get_data", "id": "9"}
    ]"""
    assert await ask(text) == [
        {"jsonrpc": "2.0", "result": 7, "id": "1"},
        {"jsonrpc": "2.0", "result": 19, "id": "2"},
        invalid_request(),
        {
            "jsonrpc": "2.0",
            "error": {"code": -32601, "message": "Method not found"},
            "id": "5",
        },
        {"jsonrpc": "2.0", "result": ["hello", 5], "id": "9"},
    ]


async def test_batch_of_notifications_is_not_answered() -> None:
    text = """[
        {"jsonrpc": "2.0", "method": "notify_sum", "params": [1,2,4]},
        {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]}
    ]"""
    assert await ask(text) is None


def invalid_request() -> dict[str, Any]:
    return {
        "jsonrpc": "2.0",
        "error": {"code": -32600, "message": "Invalid Request"},
        "id": None,
    }
