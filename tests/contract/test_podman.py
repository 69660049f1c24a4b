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
from tests.contract.conftest import folder as make_folder
from tests.contract.test_docker_state import Kind, backend_of
from tests.support import backends
from tests.support.engine import PATIENCE, EngineApi
from tests.support.images import Images
from tests.support.podman import podman_service
from tests.unit import test_snapshots_real as snapshots
from tests.unit import test_steps_real as steps
from tests.unit import test_volumes_real as volumes

__all__ = [
    "TestFullDisk",
    "TestLifecycle",
    "launch",
    "leftovers",
    "provider",
    "subject",
]

# What is tried with Docker as well; beside other tests each request may take seconds.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(90)]


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
        run_dir,
        run_dir,
        agent_binary,
        host=podman.url,
        transport=request.param,
        patience=PATIENCE,
        pull="never",
    )
    return lambda: DockerProvider(settings)


@pytest.fixture(params=["socket", "engine"])
def folder(request: pytest.FixtureRequest, podman: EngineApi, agent_binary: Path) -> Iterator[Path]:
    kind = Kind("runc", request.param, "loop" if request.param == "socket" else "memory")
    with make_folder() as path:
        backends.register(path, backend_of(kind, podman, Images(podman).python, agent_binary))
        yield path


test_odd_files_are_kept_or_left_out = snapshots.test_odd_files_are_kept_or_left_out
test_snapshots_outlive_the_server = snapshots.test_snapshots_and_their_users_outlive_the_server
test_a_paused_one_is_saved = snapshots.test_a_paused_one_is_saved_and_stays_paused
test_each_exec_leaves_a_step = steps.test_each_exec_leaves_a_step_and_undo_goes_back
test_a_volume_outlives_sandboxes = volumes.test_it_is_shared_and_outlives_sandboxes_and_the_server
test_read_only_is_read_only = volumes.test_read_only_is_read_only
