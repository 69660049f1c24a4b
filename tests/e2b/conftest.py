from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.client import Api
from tests.support.servers import RealServer


@pytest.fixture
async def api(server: RealServer) -> AsyncIterator[Api]:
    async with httpx.AsyncClient(base_url=server.url, timeout=15) as http:
        yield Api(http)


@pytest.fixture
async def box(api: Api) -> AsyncIterator[str]:
    """The id of a sandbox of this test's own."""
    created = await api.rpc("create", template="bash", ttl_ms=60_000)
    yield created["id"]
    await api.http.delete(f"/v1/sandboxes/{created['id']}")
