"""Providers are found by name, and imported only then."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from capsule.config import Config
from capsule.errors import InvalidError, NotFoundError
from capsule.model import Isolation, Template
from capsule.providers import registry
from capsule.providers.local.provider import LocalProvider


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        data_dir=tmp_path / "d", run_dir=Path("/tmp/unused"), isolation=Isolation.LANDLOCK
    )


def test_local_is_built_in(config: Config, agent_binary: Path) -> None:
    template = Template("python", needs=("python3",))
    provider = registry.make_provider("local", config, {"python": template})
    assert isinstance(provider, LocalProvider)
    assert provider.settings.data_dir == config.data_dir
    assert provider.settings.isolation is Isolation.LANDLOCK
    assert provider.settings.templates == (template,)


def test_an_unknown_name_lists_the_known_ones(config: Config) -> None:
    with pytest.raises(NotFoundError, match="no such provider: lokal") as caught:
        registry.make_provider("lokal", config)
    assert "local" in (caught.value.hint or "")


def test_other_packages_announce_theirs(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"extra": "capsule.providers.local.build:build", "broken": "no_such_module:build"}
    points = EntryPoints(
        EntryPoint(name, target, registry.GROUP) for name, target in targets.items()
    )
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))
    assert isinstance(registry.make_provider("extra", config), LocalProvider)
    assert registry.names() == ("broken", "docker", "e2b", "extra", "local")
    with pytest.raises(InvalidError, match="broken cannot be imported"):
        registry.make_provider("broken", config)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    script = (
        "import sys, capsule.providers.registry; print([m for m in sys.modules if 'local' in m])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "capsule.providers.local" not in shown.stdout
