"""The fixtures behind the conformance tests. Yours is `new_provider`; the rest is made from it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from capsule.providers.contract import Provider
from capsule.testing.harness import Launcher, NewProvider, Subject, opened


@pytest.fixture
def new_provider() -> NewProvider:
    raise NotImplementedError("define a fixture `new_provider` beside the imported tests")


@pytest_asyncio.fixture
async def provider(new_provider: NewProvider) -> AsyncIterator[Provider]:
    async with opened(new_provider()) as made:
        yield made


@pytest_asyncio.fixture
async def launch(provider: Provider) -> Launcher:
    return Launcher(provider, f"t{uuid.uuid4().hex[:10]}-")


@pytest_asyncio.fixture
async def subject(launch: Launcher) -> Subject:
    return await launch()
