"""A few words for talking to a real server."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx


class RpcFailure(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error)
        self.rpc_code: int = error["code"]
        self.message: str = error["message"]
        self.code: str = error["data"]["code"]
        self.details: dict[str, Any] = error["data"].get("details", {})


class Api:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self._ids = itertools.count(1)

    async def rpc(self, method: str, /, **params: Any) -> Any:
        """The result of `sandbox.v1.<method>`, or RpcFailure."""
        return await self.call(f"sandbox.v1.{method}", params)

    async def call(self, method: str, params: Any) -> Any:
        id = next(self._ids)
        request = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        answer = await self.http.post("/rpc", json=request)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["jsonrpc"] == "2.0" and body["id"] == id
        if "error" in body:
            raise RpcFailure(body["error"])
        return body["result"]

    async def sh(self, box: str, script: str, **options: Any) -> str:
        """What a script that must succeed writes."""
        result = await self.rpc("exec", id=box, cmd=["sh", "-c", script], **options)
        assert result["exit_code"] == 0, result
        return str(result["stdout"])


@dataclass(frozen=True, slots=True)
class SseEvent:
    name: str
    id: str
    data: Any


async def events(answer: httpx.Response) -> AsyncIterator[SseEvent]:
    """What an SSE answer says, as a browser's EventSource would read it."""
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if not line:
            if "data" in fields:
                data = json.loads(fields["data"])
                yield SseEvent(fields.get("event", "message"), fields.get("id", ""), data)
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
