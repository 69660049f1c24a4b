"""E2B's SDKs, as users install them, against real servers.

A test that asks for `cell` (or for what needs it: `place`, `e2b`, `sandbox`, …) runs twice, over
the local provider and over Docker; `server` alone is the local one that the tests of a worker
share.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from e2b import E2B, AsyncSandbox, Sandbox

from capsule.edge.e2b.access import Access
from tests.api.client import Api
from tests.api.conftest import api, box
from tests.e2b.wire import Wire
from tests.support import component_missing
from tests.support.images import Images
from tests.support.servers import RealServer, real_server

__all__ = ["api", "box"]  # fixtures of the other surfaces, for these tests too

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"


# The first of Docker's waits for the Engine and its images.
@pytest.fixture(
    scope="session", params=["local", pytest.param("docker", marks=pytest.mark.timeout(120))]
)
def cell(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def place(cell: str, request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A server whose sandboxes are of this kind. Shared: leave nothing in it."""
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
    """What every call of the SDKs takes, to find a server."""
    return {"api_key": key, "api_url": server.url, "sandbox_url": server.url}


@pytest.fixture(scope="session")
def e2b(place: RealServer) -> E2B:
    """The SDK bound to the server: `e2b.Sandbox.create()`, `e2b.AsyncSandbox`, `e2b.Volume`."""
    return E2B(**parameters(place))  # type: ignore[arg-type]  # a TypedDict there


@pytest.fixture
def e2b_env(place: RealServer, monkeypatch: pytest.MonkeyPatch) -> RealServer:
    """As a user has it: the settings in the environment, and `from e2b import Sandbox`."""
    monkeypatch.setenv("E2B_API_KEY", KEY)
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"):
        monkeypatch.setenv(name, place.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    return place


@pytest.fixture
def sandbox(e2b: E2B) -> Iterator[Sandbox]:
    """One of this test's own."""
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
    """One for all tests that leave no trace in it."""
    made = e2b.Sandbox.create(timeout=1800)
    yield made
    made.kill()


@pytest.fixture(scope="session")
def access(server: RealServer) -> Access:
    """The server's own: knows the token of every sandbox."""
    return Access.open(server.base / "data")


@pytest.fixture
def wire(api: Api, box: str, access: Access) -> Wire:
    return Wire(api.http, box, access.token(box))


@pytest.fixture
def node(node_modules: Path, tmp_path: Path) -> Path:
    """A folder in which Node finds E2B's packages."""
    if shutil.which("node") is None:
        component_missing("no node")
    (tmp_path / "node_modules").symlink_to(node_modules)
    return tmp_path
