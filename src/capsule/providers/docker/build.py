"""From the server's configuration to the Docker provider."""

from __future__ import annotations

from collections.abc import Mapping

from capsule import agentbin
from capsule.config import Config
from capsule.model import Template
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings


def build(config: Config, templates: Mapping[str, Template]) -> DockerProvider:
    return DockerProvider(
        DockerSettings(
            data_dir=config.data_dir,
            run_dir=config.run_dir,
            agent=agentbin.find(),
            host=config.docker_host,
            runtime=config.docker_runtime,
            transport=config.docker_transport,
            disk_backing=config.disk_backing,
            pull=config.docker_pull,
            image=config.docker_image,
            min_isolation=config.min_isolation,
            profiles_dir=config.templates_dir,
            templates=tuple(templates.values()),
        )
    )
