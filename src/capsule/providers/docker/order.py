"""What a launch is decided from, and what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capsule.errors import ForbiddenError, NotSupportedError
from capsule.model import SandboxId, SandboxSpec
from capsule.providers.docker.agent_volume import AgentVolume
from capsule.providers.docker.disks import Disks
from capsule.providers.docker.engine import Engine
from capsule.providers.docker.filters import Filters
from capsule.providers.docker.helpers import Helpers
from capsule.providers.docker.probe import Facts, Runtime
from capsule.providers.docker.settings import DockerSettings
from capsule.providers.docker.supply import Found, Supply
from capsule.providers.docker.volumes import ContainerVolumes
from capsule.providers.local.cores import Cores
from capsule.providers.relay.relays import Relays


@dataclass(slots=True)
class Host:
    """What an open provider has once it knows its Engine."""

    engine: Engine
    facts: Facts
    supply: Supply
    cores: Cores
    relays: Relays
    agent_volume: AgentVolume
    disks: Disks
    filters: Filters
    helpers: Helpers
    volumes: ContainerVolumes
    # Runtimes whose sockets do not come out, though they should: learnt by trying.
    silent: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Order:
    """A launch that has been decided on."""

    id: SandboxId
    spec: SandboxSpec
    runtime: Runtime
    image: Found
    way: str
    disk: bool
    cpus: tuple[int, ...]
    layers: Sequence[Path]
    over_layers: bool  # its disk lies over them; else it is filled from them

    @property
    def sudo(self) -> bool:
        """Whether it gets ours: one more mount, from this host."""
        return self.spec.template.sudo and self.way == "socket"


def runtime_for(spec: SandboxSpec, facts: Facts, settings: DockerSettings) -> Runtime:
    template = spec.template
    if template.network != "none":
        raise NotSupportedError(
            f"template {template.name} asks for network {template.network}",
            hint="the docker provider gives none; set `network: none`",
        )
    runtime = facts.runtime(spec.runtime or template.runtime or settings.runtime)
    if runtime.isolation.weaker_than(settings.min_isolation):
        raise ForbiddenError(
            f"runtime {runtime.name} isolates by {runtime.isolation}, "
            f"required: {settings.min_isolation}",
            hint="take another runtime, or set a lower CAPSULE_MIN_ISOLATION",
            field="runtime",
        )
    return runtime
