"""The local provider keeps the contract, at every isolation level this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.model import Isolation
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from capsule.testing.harness import NewProvider
from capsule.testing.suite import *  # noqa: F403  # the tests

pytestmark = pytest.mark.real


@pytest.fixture(params=[Isolation.NAMESPACES, Isolation.LANDLOCK])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    level: Isolation = request.param
    return level


@pytest.fixture
def new_provider(
    isolation: Isolation, data_dir: Path, run_dir: Path, agent_binary: Path
) -> NewProvider:
    settings = LocalSettings(data_dir, run_dir, agent_binary, isolation=isolation)
    return lambda: LocalProvider(settings)
