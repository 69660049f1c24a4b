"""A client that leaves while its create waits: nobody makes a sandbox for nobody."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from capsule.service import CreateRequest, Sandbox
from capsule.service.caller import OPERATOR, Caller
from tests.api.double import ServiceDouble, serving
from tests.support import eventually


class Patient(ServiceDouble):
    """Whose creates wait in line."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.left = 0

    async def create(self, request: CreateRequest, caller: Caller = OPERATOR) -> Sandbox:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
            self.left += 1
        raise AssertionError


CALLS = {
    "rpc": ("/rpc", {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.create", "params": {}}),
    "rest": ("/v1/sandboxes", {}),
}


@pytest.mark.parametrize("way", list(CALLS))
async def test_who_leaves_the_server_leaves_the_line(way: str) -> None:
    path, body = CALLS[way]
    service = Patient()
    async with serving(service) as running:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}") as http:
            asking = asyncio.create_task(http.post(path, json=body))
            await eventually(lambda: service.waiting == 1, what="the create to wait")
            asking.cancel()
            await asyncio.wait({asking})
            await eventually(lambda: service.left == 1, what="it to be given up")
