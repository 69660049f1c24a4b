"""The fixtures behind the conformance tests.

Yours is `new_provider`, and `leftovers` if you can see more of a box than the contract shows; the
rest is made from these.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from capsule.providers.contract import Provider
from capsule.testing.harness import Launcher, Leftovers, NewProvider, Subject, opened


@pytest.fixture
def new_provider() -> NewProvider:
    raise NotImplementedError("define a fixture `new_provider` beside the imported tests")


@pytest.fixture
def leftovers() -> Leftovers:
    return lambda handle: []


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
