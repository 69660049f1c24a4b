"""E2B's SDKs, as users install them, against real servers.

A test that uses `cell` (or `place`, `e2b`, `sandbox`, …, which need it) runs over the local
provider and over Docker. `server` is the local one alone, shared by the tests of a worker.
The same behaviour is not tried with every client: most tests use the blocking SDK, test_clients.py
uses the asynchronous one, and node/ the one for Node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from e2b import E2B, AsyncSandbox, Sandbox

from capsule.edge.e2b.access import Access
from tests.api.client import Api
from tests.api.conftest import api, box
from tests.e2b.wire import Wire
from tests.support.images import Images
from tests.support.servers import RealServer, real_server

__all__ = ["api", "box"]  # fixtures of the other surfaces, for these tests too

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"

# Over Docker only these run without CI=true: what the SDK asks is the same, and what the provider
# does differently shows in them.
WITH_DOCKER = ("test_state.py", "test_ports.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        cell = item.callspec.params.get("cell") if hasattr(item, "callspec") else None
        if item.path.parent != Path(__file__).parent:
            continue
        if cell == "docker" and item.path.name not in WITH_DOCKER:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("timeout") is None:
            # A busy machine takes 20 seconds for a server, and the first test waits for it.
            item.add_marker(pytest.mark.timeout(60))


# The first of Docker's waits for the Engine and its images.
@pytest.fixture(
    scope="session", params=["local", pytest.param("docker", marks=pytest.mark.timeout(120))]
)
def cell(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def place(cell: str, request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A server whose sandboxes are of this kind. It is shared: leave nothing in it."""
    if cell == "local":
        yield request.getfixturevalue("server")
        return
    images: Images = request.getfixturevalue("images")
    settings = {
        "PROVIDER": "docker",
        "DOCKER_HOST": request.getfixturevalue("docker_url"),
        "DOCKER_PULL": "never",
        "DOCKER_IMAGE": images.python,
    }
    with real_server(**settings) as running:
        yield running


def parameters(server: RealServer, key: str = KEY) -> dict[str, str]:
    """The options by which every call of the SDKs finds a server."""
    return {"api_key": key, "api_url": server.url, "sandbox_url": server.url}


@pytest.fixture(scope="session")
def e2b(place: RealServer) -> E2B:
    """The SDK bound to the server: `e2b.Sandbox.create()`, `e2b.AsyncSandbox`, `e2b.Volume`."""
    return E2B(**parameters(place))  # type: ignore[arg-type]  # a TypedDict there


@pytest.fixture
def e2b_env(place: RealServer, monkeypatch: pytest.MonkeyPatch) -> RealServer:
    """The settings in the environment, for `from e2b import Sandbox`."""
    monkeypatch.setenv("E2B_API_KEY", KEY)
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"):
        monkeypatch.setenv(name, place.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    return place


@pytest.fixture
def sandbox(e2b: E2B) -> Iterator[Sandbox]:
    """A sandbox for this test alone."""
    made = e2b.Sandbox.create(timeout=120)
    yield made
    made.kill()


@pytest.fixture
async def async_sandbox(e2b: E2B) -> AsyncIterator[AsyncSandbox]:
    made = await e2b.AsyncSandbox.create(timeout=120)
    yield made
    await made.kill()


@pytest.fixture(scope="session")
def shared(e2b: E2B) -> Iterator[Sandbox]:
    """One sandbox for all tests that leave nothing in it."""
    made = e2b.Sandbox.create(timeout=1800)
    yield made
    made.kill()


@pytest.fixture(scope="session")
def access(server: RealServer) -> Access:
    """Knows the token of every sandbox of the server."""
    return Access.open(server.base / "data")


@pytest.fixture
def wire(api: Api, box: str, access: Access) -> Wire:
    return Wire(api.http, box, access.token(box))


@pytest.fixture
def node(node_modules: Path, tmp_path: Path) -> Path:
    """A folder in which Node finds E2B's packages."""
    (tmp_path / "node_modules").symlink_to(node_modules)
    return tmp_path
