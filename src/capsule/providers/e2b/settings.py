"""What the E2B provider is told. No setting is read from anywhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from capsule.model import Template

DEFAULT_TEMPLATE = "base"


@dataclass(frozen=True, slots=True)
class E2bSettings:
    data_dir: Path  # who we are to the cloud: survives a reboot
    run_dir: Path
    agent: Path
    api_key: str | None = field(default=None, repr=False)
    api_url: str | None = None  # None: the SDK's own, which is E2B's
    sandbox_url: str | None = None
    domain: str | None = None
    template: str = DEFAULT_TEMPLATE  # "{template}" in it is the name of Capsule's
    timeout: int = 900  # seconds that the cloud keeps a sandbox whose server is gone
    patience: float = 30.0  # seconds for an answer of the cloud
    profiles_dir: Path | None = None  # seccomp profiles besides Capsule's own

    def template_of(self, template: Template) -> str:
        return self.template.replace("{template}", template.name)
