"""Podman's compatible socket keeps the contract, as far as it differs from Docker's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.model import Template
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings
from capsule.testing.boxes import TestLifecycle
from capsule.testing.files import TestFullDisk
from capsule.testing.fixtures import launch, leftovers, provider, subject
from capsule.testing.harness import NewProvider
from tests.conftest import engine_needed
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.support.podman import podman_service

__all__ = [
    "TestFullDisk",
    "TestLifecycle",
    "launch",
    "leftovers",
    "provider",
    "subject",
]

pytestmark = pytest.mark.real


@pytest.fixture(scope="session")
def podman() -> Iterator[EngineApi]:
    with engine_needed(), podman_service() as api:
        yield api


@pytest.fixture(scope="session")
def template(podman: EngineApi) -> Template:
    return Template("conformance", image=Images(podman).python)


@pytest.fixture(params=["socket", "engine"])
def new_provider(
    request: pytest.FixtureRequest, podman: EngineApi, run_dir: Path, agent_binary: Path
) -> NewProvider:
    settings = DockerSettings(
        run_dir, run_dir, agent_binary, host=podman.url, transport=request.param, pull="never"
    )
    return lambda: DockerProvider(settings)
