from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import cast

import httpx
import msgspec
import pytest

from capsule.audit.trail import Trail
from capsule.config import Config
from capsule.edge.drain import Gate
from capsule.edge.e2b.access import Access
from capsule.edge.files import FileVerbs
from capsule.edge.methods import build_methods
from capsule.edge.verbs import Verbs
from capsule.service import Service
from capsule.service.happenings import Happenings
from capsule.webhooks.hooks import Webhooks
from tests.api.client import Api
from tests.api.double import DOUBLES, ServiceDouble
from tests.support.servers import RealServer


@pytest.fixture(scope="session", autouse=True)
def doubles_end_with_the_tests() -> Iterator[None]:
    yield
    DOUBLES.close()


@pytest.fixture
async def api(server: RealServer) -> AsyncIterator[Api]:
    # Here as everywhere in these tests: to load certificates, for plain HTTP, takes 20 ms.
    async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=15) as http:
        yield Api(http)


@pytest.fixture
async def box(api: Api) -> AsyncIterator[str]:
    """The id of a sandbox of this test's own."""
    created = await api.rpc("create", template="bash", ttl_ms=60_000)
    yield created["id"]
    await api.http.delete(f"/v1/sandboxes/{created['id']}")


@pytest.fixture(scope="session")
def api_params() -> dict[str, list[str]]:
    """The names of all JSON-RPC methods, and of their params."""
    config, service = Config(), cast(Service, ServiceDouble())
    happenings = Happenings()
    hooks, trail = Webhooks(config, happenings), Trail(config, happenings)
    verbs = Verbs(config, service, Gate(), hooks, trail, Access(b"secret"))
    methods = build_methods(verbs, FileVerbs(config, service))
    return {
        name: [field.encode_name for field in msgspec.structs.fields(method.params)]
        for name, method in methods.items()
    }
