"""Images that are not there are pulled, or it is said what to do; a create that is given up ends.

An Engine in trouble is in test_docker_trouble.py, one that is killed in test_docker_daemon.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from capsule.errors import CapsuleError, NotFoundError
from capsule.model import MIB, Limits, SandboxId, SandboxSpec, Template
from capsule.providers.contract import Box, Provider
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings
from capsule.testing.harness import opened, owned
from tests.support.crooked_engine import CrookedEngine, crooked
from tests.support.engine import EngineApi
from tests.support.images import Images

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(60)]

LIMITS = Limits(disk=16 * MIB)


@pytest.fixture
async def door(docker_url: str, tmp_path: Path) -> AsyncIterator[CrookedEngine]:
    async with crooked(docker_url, tmp_path) as made:
        yield made


@pytest.fixture
def settings(door: CrookedEngine, tmp_path: Path, agent_binary: Path) -> DockerSettings:
    """Impatient: two seconds for answers, twelve for work."""
    return DockerSettings(
        tmp_path, tmp_path, agent_binary, host=door.url, patience=0.4, pull="never"
    )


@pytest.fixture
async def provider(settings: DockerSettings, door: CrookedEngine) -> AsyncIterator[DockerProvider]:
    made = DockerProvider(settings)
    async with opened(made):
        yield made
        door.behave()  # for the tidying up


@pytest.fixture
def spec(images: Images) -> SandboxSpec:
    return SandboxSpec(Template("test", image=images.python), LIMITS)


async def launched(provider: Provider, spec: SandboxSpec, id: str = "a") -> Box:
    return await provider.launch(SandboxId(id), spec)


async def refused(call: object, *, within: float) -> CapsuleError:
    began = time.monotonic()
    with pytest.raises(CapsuleError) as caught:
        await call  # type: ignore[misc]
    assert time.monotonic() - began < within
    return caught.value


async def test_a_cancelled_create_is_brought_to_its_end(
    provider: DockerProvider, door: CrookedEngine, spec: SandboxSpec
) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def late(request: web.Request) -> None:
        asked.set()
        await left.wait()

    door.on("POST containers/create", late)
    task = asyncio.create_task(launched(provider, spec))
    await asyncio.wait_for(asked.wait(), 10)
    task.cancel()
    left.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await owned(provider) == []


async def test_a_missing_image_of_ours_says_how_to_build_it(provider: DockerProvider) -> None:
    spec = SandboxSpec(Template("nosuch"), LIMITS)
    error = await refused(launched(provider, spec), within=5)
    assert isinstance(error, NotFoundError)
    assert "capsule/nosuch:latest" in error.message
    assert error.hint == "build it: capsule template build nosuch"
    assert await owned(provider) == []


async def test_a_missing_image_is_refused_when_pulls_are_off(provider: DockerProvider) -> None:
    spec = SandboxSpec(Template("x", image="registry.example/x:1"), LIMITS)
    error = await refused(launched(provider, spec), within=5)
    assert isinstance(error, NotFoundError)
    assert "pulls are off" in error.message


async def test_a_missing_image_is_pulled_once_with_progress(
    settings: DockerSettings, door: CrookedEngine, images: Images, engine: EngineApi
) -> None:
    name = "registry.example/pulled:1"
    door.on("POST images/create", door.pulls(images.python, name))
    told: list[str] = []
    spec = SandboxSpec(Template("x", image=name), LIMITS, progress=told.append)
    try:
        async with opened(DockerProvider(replace(settings, pull="missing"))) as provider:
            await asyncio.gather(*(launched(provider, spec, f"p{n}") for n in range(3)))
        assert door.pulled == 1
        assert f"pulling {name}: 1 of 1 MB" in told
    finally:
        engine.call("DELETE", f"/images/{name}")


async def test_a_registry_that_is_not_there_is_unavailable(
    settings: DockerSettings, images: Images
) -> None:
    spec = SandboxSpec(Template("x", image="localhost:1/x:1"), LIMITS)
    patient = replace(settings, pull="missing")
    async with opened(DockerProvider(patient)) as provider:
        error = await refused(launched(provider, spec), within=20)
        assert isinstance(error, CapsuleError) and "localhost:1" in error.message
        assert await owned(provider) == []
