"""From the server's configuration to the E2B provider."""

from __future__ import annotations

from collections.abc import Mapping

from capsule import agentbin
from capsule.cloud_settings import e2b_key
from capsule.config import Config
from capsule.model import Template
from capsule.providers.e2b.provider import E2bProvider
from capsule.providers.e2b.settings import E2bSettings


def build(config: Config, templates: Mapping[str, Template]) -> E2bProvider:
    """What the configuration leaves out comes from the variables that E2B's own SDK reads."""
    return E2bProvider(
        E2bSettings(
            data_dir=config.data_dir,
            run_dir=config.run_dir,
            agent=agentbin.find(),
            api_key=e2b_key(config),
            api_url=config.e2b_api_url,
            sandbox_url=config.e2b_sandbox_url,
            domain=config.e2b_domain,
            template=config.e2b_template,
            timeout=int(config.e2b_timeout),
            profiles_dir=config.templates_dir,
        )
    )
