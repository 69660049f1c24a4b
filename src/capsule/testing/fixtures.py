"""The fixtures behind the conformance tests.

Yours is `new_provider`; also `template`, if boxes of yours do not start from the host's own system,
and `leftovers`, if you can see more of a box than the contract shows. The rest is made from these.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from capsule.model import Template
from capsule.providers.contract import Provider
from capsule.testing.harness import Launcher, Leftovers, NewProvider, Subject, opened


@pytest.fixture
def new_provider() -> NewProvider:
    raise NotImplementedError("define a fixture `new_provider` beside the imported tests")


@pytest.fixture
def template() -> Template:
    """What boxes start from: a system with sh, bash, python3, and the usual small programs."""
    return Template("conformance")


@pytest.fixture
def leftovers() -> Leftovers:
    return lambda handle: []


@pytest_asyncio.fixture
async def provider(new_provider: NewProvider) -> AsyncIterator[Provider]:
    async with opened(new_provider()) as made:
        yield made


@pytest_asyncio.fixture
async def launch(provider: Provider, template: Template) -> Launcher:
    return Launcher(provider, f"t{uuid.uuid4().hex[:10]}-", template)


@pytest_asyncio.fixture
async def subject(launch: Launcher) -> Subject:
    return await launch()
