"""From the server's configuration to the local provider."""

from __future__ import annotations

from collections.abc import Mapping

from capsule import agentbin
from capsule.config import Config
from capsule.model import Template
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings


def build(config: Config, templates: Mapping[str, Template]) -> LocalProvider:
    return LocalProvider(
        LocalSettings(
            data_dir=config.data_dir,
            run_dir=config.run_dir,
            agent=agentbin.find(),
            isolation=config.isolation,
            disk_backing=config.disk_backing,
            cgroup_scope=config.cgroup_scope,
            profiles_dir=config.templates_dir,
            templates=tuple(templates.values()),
        )
    )
