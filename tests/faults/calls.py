"""The few requests that fault tests make, short to write."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

import httpx


async def create(http: httpx.AsyncClient, **body: Any) -> str:
    answer = await http.post("/v1/sandboxes", json={"template": "bash", **body})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def attempt(http: httpx.AsyncClient, id: str, cmd: Any, **body: Any) -> httpx.Response:
    return await http.post(f"/v1/sandboxes/{id}/execs", json={"cmd": cmd, **body})


async def execute(http: httpx.AsyncClient, id: str, cmd: Any, **body: Any) -> dict[str, Any]:
    """The result of an exec, whatever the program did."""
    answer = await attempt(http, id, cmd, **body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def start(http: httpx.AsyncClient, id: str, cmd: Any, **body: Any) -> str:
    """The id of an exec that runs."""
    path = f"/v1/sandboxes/{id}/execs?wait=false"
    answer = await http.post(path, json={"cmd": cmd, "timeout_ms": 600_000, **body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["exec_id"])


async def finished(http: httpx.AsyncClient, id: str, exec_id: str) -> dict[str, Any]:
    """One exec as it is now: its `exit` is null while it runs."""
    answer = await http.get(f"/v1/sandboxes/{id}/execs/{exec_id}?output=true")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def state(http: httpx.AsyncClient, id: str) -> dict[str, Any]:
    body: dict[str, Any] = (await http.get(f"/v1/sandboxes/{id}")).json()
    return body


async def delete(http: httpx.AsyncClient, id: str) -> int:
    return (await http.delete(f"/v1/sandboxes/{id}")).status_code


async def works(http: httpx.AsyncClient, id: str) -> bool:
    """It is usable, or it is gone. Anything else fails the test."""
    answer = await attempt(http, id, "echo $((6 * 7))")
    if answer.status_code in (404, 410):
        return False
    assert answer.status_code == 200, answer.text
    assert answer.json()["stdout"] == "42\n"
    return True


async def begun(http: httpx.AsyncClient, id: str) -> bool:
    """Whether a program that begins with `touch begun` has."""
    return bool((await execute(http, id, "test -e begun"))["exit_code"] == 0)


async def is_failed(http: httpx.AsyncClient, id: str) -> bool:
    return bool((await state(http, id))["state"] == "failed")


async def took(call: Awaitable[Any]) -> float:
    """How long it took, in seconds."""
    began = time.monotonic()
    await call
    return time.monotonic() - began


async def refused(call: Awaitable[httpx.Response], *, within: float = 5.0) -> dict[str, Any]:
    """As unavailable, soon, and with a word on what to do: the error."""
    began = time.monotonic()
    answer = await call
    assert time.monotonic() - began < within, answer.text
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable"), answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["hint"]
    return error
