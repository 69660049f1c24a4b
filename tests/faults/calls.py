"""The few requests that fault tests make, short to write."""

from __future__ import annotations

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
