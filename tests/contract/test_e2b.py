"""The E2B provider keeps the contract: with E2B's own SDK, and a second Capsule as the cloud."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from e2b import E2B

from capsule.errors import ForbiddenError
from capsule.model import Handle, Template
from capsule.providers.e2b.provider import E2bProvider
from capsule.providers.e2b.settings import E2bSettings
from capsule.testing.harness import (
    Launcher,
    Leftovers,
    NewProvider,
    opened,
    owned,
    until,
)
from capsule.testing.suite import *  # noqa: F403  # the tests
from tests.contract.conftest import folder
from tests.contract.shelf import (
    MakeProvider,
    launch_of_ones_own,
    provider_of_ones_own,
    shelves,
    subject_that_is_shared,
)
from tests.support.servers import RealServer, real_server

__all__ = ["launch_of_ones_own", "provider_of_ones_own", "shelves", "subject_that_is_shared"]

# One loop for all: the boxes that tests share, and the provider that holds them, live in it.
pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60),  # the first test waits for the cloud, a server
]

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"


ROOMY = "roomy"  # a template as `base`, where an agent and a fork bomb share more than half a core


@pytest.fixture(scope="session")
def cloud() -> Iterator[RealServer]:
    base = (files("capsule") / "templates" / "base.yaml").read_text()
    roomy = base.replace("name: base", f"name: {ROOMY}").replace("cpus: 0.5", "cpus: 2")
    with folder() as templates:
        (templates / f"{ROOMY}.yaml").write_text(roomy)
        with real_server(API_KEYS=KEY, TEMPLATES_DIR=str(templates)) as running:
            yield running


@pytest.fixture(name="template")
def template_of_the_cloud() -> Template:
    return Template("conformance")


def provider_of(cloud: RealServer, where: Path, agent: Path, timeout: int = 900) -> E2bProvider:
    settings = E2bSettings(
        where,
        where,
        agent,
        api_key=KEY,
        api_url=cloud.url,
        sandbox_url=cloud.url,
        template=ROOMY,
        timeout=timeout,
    )
    return E2bProvider(settings)


@pytest.fixture(scope="session")
def backend(cloud: RealServer) -> RealServer:
    return cloud


@pytest.fixture
def box_kind() -> str:
    return "e2b"


@pytest.fixture
def make_provider(cloud: RealServer, agent_binary: Path) -> MakeProvider:
    return lambda where: provider_of(cloud, where, agent_binary)


@pytest.fixture
def new_provider(cloud: RealServer, run_dir: Path, agent_binary: Path) -> NewProvider:
    return lambda: provider_of(cloud, run_dir, agent_binary)


@pytest.fixture(name="leftovers")
def leftovers_in_the_cloud(cloud: RealServer) -> Leftovers:
    def look(handle: Handle) -> list[str]:
        boxes = cloud.base / "run" / "boxes"
        id = str(handle.data.get("cloud", "none"))
        return [str(path) for path in boxes.glob(id)]

    return look


async def test_the_clouds_timeout_is_extended_while_we_live(
    cloud: RealServer, run_dir: Path, agent_binary: Path, template: Template
) -> None:
    async with opened(provider_of(cloud, run_dir, agent_binary, timeout=6)) as provider:
        subject = await Launcher(provider, f"l{uuid.uuid4().hex[:10]}-", template)()
        found = E2B(api_key=KEY, api_url=cloud.url, sandbox_url=cloud.url).AsyncSandbox
        id = subject.box.handle.data["cloud"]
        ends = (await found.get_info(id)).end_at

        async def later() -> bool:
            return (await found.get_info(id)).end_at > ends

        await until(later, what="an end that is later")
        assert await subject.output("echo alive") == "alive"


async def test_a_wrong_key_of_one_create_hides_no_box(launch: Launcher) -> None:
    subject = await launch()
    with pytest.raises(ForbiddenError, match="refused the key"):
        spec = replace(launch.spec(), credential="e2b_wrong_key")
        await launch.provider.launch(launch.new_id(), spec)
    assert [each.sandbox_id for each in await owned(launch.provider)] == [
        subject.box.handle.sandbox_id
    ]
