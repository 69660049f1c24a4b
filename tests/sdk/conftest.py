"""Clients of the real server, and a sandbox that is gone after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from capsule_sdk import AsyncCapsule, AsyncCapsuleClient, Capsule, CapsuleClient
from tests.support.servers import RealServer


@pytest.fixture
def client(server: RealServer) -> Iterator[CapsuleClient]:
    with CapsuleClient(server.url) as made:
        yield made


@pytest.fixture
def capsule(client: CapsuleClient) -> Iterator[Capsule]:
    with client.create("python") as made:
        yield made


@pytest.fixture
async def async_client(server: RealServer) -> AsyncIterator[AsyncCapsuleClient]:
    async with AsyncCapsuleClient(server.url) as made:
        yield made


@pytest.fixture
async def async_capsule(async_client: AsyncCapsuleClient) -> AsyncIterator[AsyncCapsule]:
    async with await async_client.create("python") as made:
        yield made
