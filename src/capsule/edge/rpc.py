"""JSON-RPC 2.0 on `POST /rpc`: batches, notifications, the standard error codes.

Params are named. The calls of a batch run side by side, except that calls on the same sandbox run
in the order they were sent (write a file, then run it); the answers keep the order of the calls.
Answers to calls have status 200, whatever became of them; only what is wrong with the HTTP
request itself (size, key, origin) has another status.

This is the hot path: a plain ASGI function, msgspec in and out, no framework between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.types import Receive, Scope, Send

from capsule.edge.body import read_body, require_json
from capsule.edge.errors import (
    JSON_HEADERS,
    encode,
    retry_after,
    rpc_error,
    understand,
    wrong_method,
)
from capsule.edge.identity import caller_of
from capsule.edge.presence import client
from capsule.edge.rates import CHARGE, Charge, nothing
from capsule.edge.scopes import METHODS, method_scope
from capsule.edge.shapes import malformed, parse
from capsule.errors import CapsuleError, InvalidError
from capsule.service.caller import Caller, KeyScope
from capsule.tracing import span

MAX_BATCH = 256
MAX_PARALLEL = 16

Id = str | int | float | None


class Request(msgspec.Struct):
    """The envelope. Unknown members are ignored: the specification does not forbid them."""

    jsonrpc: str
    method: str
    params: Raw | UnsetType = UNSET
    id: Id | UnsetType = UNSET


class OnlyId(msgspec.Struct):
    id: Id = None


class Success(msgspec.Struct, kw_only=True):
    jsonrpc: str = "2.0"
    id: Id
    result: Any


@dataclass(frozen=True, slots=True)
class Method:
    """`lane` names what calls must not overtake each other on: the sandbox."""

    params: Any  # the type
    run: Callable[[Caller, Any], Awaitable[Any]]
    returns: Any = None
    lane: Callable[[Any], str | None] = lambda params: None
    decoder: msgspec.json.Decoder[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decoder", msgspec.json.Decoder(self.params))


class ProtocolFault(CapsuleError):
    """One of the specification's own errors: its short message, and ours in `data`."""

    def __init__(self, rpc_code: int, name: str, cause: CapsuleError) -> None:
        super().__init__(cause.message, hint=cause.hint, **cause.details)
        self.code = cause.code  # type: ignore[misc]  # taken over from the cause
        self.rpc_code = rpc_code  # type: ignore[misc]  # one class for the three codes
        self.name = name


def parse_error(cause: CapsuleError) -> ProtocolFault:
    return ProtocolFault(-32700, "Parse error", cause)


def invalid_request(cause: CapsuleError) -> ProtocolFault:
    return ProtocolFault(-32600, "Invalid Request", cause)


def method_not_found(name: str) -> ProtocolFault:
    cause = InvalidError(f"no such method: {name[:80]}", hint="docs/rpc.md lists every method")
    return ProtocolFault(-32601, "Method not found", cause)


# Method, who called, which sandbox, the code of its error, seconds.
Called = Callable[[str, Caller, str | None, str, float], None]


def untold(*_: object) -> None:
    pass


class Call(NamedTuple):
    """One entry of a batch, understood as far as possible."""

    id: Id | UnsetType
    method: Method | None = None
    params: Any = None
    name: str = ""
    error: CapsuleError | None = None


_REQUEST = msgspec.json.Decoder(Request)
_ONLY_ID = msgspec.json.Decoder(OnlyId)
_BATCH = msgspec.json.Decoder(list[Raw])
_NO_PARAMS = b"{}"


class Rpc:
    """The ASGI endpoint over a table of methods."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        scopes: Mapping[str, KeyScope] = METHODS,
        called: Called = untold,
    ) -> None:
        """`scopes` says what each method needs. Raises LookupError if it does not. `called` is told
        of every call that was carried out."""
        self._methods = methods
        self._called = called
        self._scopes = {name: method_scope(name, scopes) for name in methods}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise wrong_method(scope["method"], ["POST"])
        require_json(scope)
        body = await read_body(receive)
        client.set(receive)
        charge: Charge = scope.get(CHARGE, nothing)
        answer, headers = await self.answer(body, caller_of(scope), charge)
        status = 200 if answer else 204
        if answer:
            headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(answer)), *headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def answer(
        self, body: bytes, caller: Caller, charge: Charge = nothing
    ) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """The response's body (empty: nothing but notifications) and extra headers. Never
        raises.
        """
        if body.lstrip()[:1] == b"[":
            return await self._answer_batch(body, caller, charge), []
        call = self._understand(body)
        result, error = await self._carry_out(call, caller)
        wait = retry_after(error) if error else None
        headers = [(b"retry-after", b"%d" % wait)] if wait else []
        return _envelope(call.id, result, error), headers

    async def _answer_batch(self, body: bytes, caller: Caller, charge: Charge) -> bytes:
        try:
            entries = _BATCH.decode(body)
        except (ValueError, RecursionError) as error:
            return _envelope(None, None, parse_error(malformed(error, body)))
        if not 1 <= len(entries) <= MAX_BATCH:
            cause = InvalidError(f"batch: {len(entries)} calls, must be 1 to {MAX_BATCH}")
            return _envelope(None, None, invalid_request(cause))
        try:
            charge(len(entries) - 1)  # the request itself has been counted
        except CapsuleError as error:
            return _envelope(None, None, error)
        calls = [self._understand(entry) for entry in entries]
        answers = [answer for answer in await self._run_all(calls, caller) if answer]
        return b"[" + b",".join(answers) + b"]" if answers else b""

    async def _run_all(self, calls: Sequence[Call], caller: Caller) -> list[bytes]:
        answers = [b""] * len(calls)
        room = asyncio.Semaphore(MAX_PARALLEL)

        async def follow(lane: Sequence[int]) -> None:
            async with room:
                for i in lane:
                    answers[i] = _envelope(calls[i].id, *await self._carry_out(calls[i], caller))

        async with asyncio.TaskGroup() as group:
            for lane in _lanes(calls):
                group.create_task(follow(lane))
        return answers

    def _understand(self, raw: bytes | Raw) -> Call:
        try:
            request = _REQUEST.decode(raw)
        except msgspec.ValidationError as error:
            cause = InvalidError(f"not a JSON-RPC request: {str(error)[:200]}")
            return Call(id=_id_of(raw), error=invalid_request(cause))
        except (ValueError, RecursionError) as error:
            return Call(id=None, error=parse_error(malformed(error, raw)))
        if request.jsonrpc != "2.0":
            cause = InvalidError(f'jsonrpc: must be "2.0", got {request.jsonrpc[:20]!r}')
            return Call(id=_id_of(raw), error=invalid_request(cause))
        method = self._methods.get(request.method)
        if method is None:
            return Call(id=request.id, error=method_not_found(request.method))
        try:
            raw_params = _NO_PARAMS if request.params is UNSET else request.params
            return Call(request.id, method, parse(method.decoder, raw_params), request.method)
        except CapsuleError as error:
            return Call(id=request.id, error=error)

    async def _carry_out(self, call: Call, caller: Caller) -> tuple[Any, CapsuleError | None]:
        if call.error is not None or call.method is None:
            return None, call.error
        began, known = time.perf_counter(), None
        try:
            caller.require(self._scopes[call.name], call.name)
            with span(call.name):
                return await call.method.run(caller, call.params), None
        except Exception as error:  # the edge: whatever it is becomes an answer
            known = understand(error)
            return None, known
        finally:
            took, code = time.perf_counter() - began, known.code if known else ""
            self._called(call.name, caller, call.method.lane(call.params), code, took)


def _lanes(calls: Sequence[Call]) -> list[list[int]]:
    lanes: dict[object, list[int]] = {}
    for i, call in enumerate(calls):
        name = call.method.lane(call.params) if call.method else None
        lanes.setdefault(i if name is None else name, []).append(i)
    return list(lanes.values())


def _id_of(raw: bytes | Raw) -> Id:
    try:
        return _ONLY_ID.decode(raw).id
    except (ValueError, RecursionError):
        return None


def _envelope(id: Id | UnsetType, result: Any, error: CapsuleError | None) -> bytes:
    # Notifications are not answered, not even with an error; what could not be read as one is.
    if id is UNSET:
        return b""
    if error is None:
        return encode(Success(id=id, result=result))  # whole: a result may be large
    body = rpc_error(error)
    if isinstance(error, ProtocolFault):
        body["message"] = error.name
    return b'{"jsonrpc":"2.0","id":' + encode(id) + b',"error":' + encode(body) + b"}"
