"""The heart of the contract, in the machine with systemd: as an ordinary user with a scope."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from capsule import agentbin
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from capsule.testing.boxes import TestAdoption, TestLifecycle
from capsule.testing.fixtures import launch, leftovers, provider, subject, template
from capsule.testing.harness import NewProvider
from capsule.testing.killing import TestKill
from capsule.testing.limits import TestLimits

__all__ = ["TestAdoption", "TestKill", "TestLifecycle", "TestLimits"]
__all__ += ["launch", "leftovers", "provider", "subject", "template"]


@pytest.fixture
def new_provider(tmp_path: Path) -> NewProvider:
    run_dir = Path(tempfile.mkdtemp(prefix="cap-"))  # paths of sockets are short
    settings = LocalSettings(tmp_path / "data", run_dir, agentbin.find())
    return lambda: LocalProvider(settings)
