"""What the Docker provider is told. No setting is read from anywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capsule.errors import InvalidError
from capsule.model import Isolation, Template
from capsule.providers.local.settings import DISK_BACKINGS

TRANSPORTS = ("auto", "socket", "engine")
PULLS = ("missing", "never")
DEFAULT_IMAGE = "capsule/{template}:latest"


@dataclass(frozen=True, slots=True)
class DockerSettings:
    data_dir: Path  # who we are to the Engine: survives a reboot
    run_dir: Path  # the boxes' sockets: short paths, gone after a reboot
    agent: Path
    host: str | None = None  # as DOCKER_HOST; None: that, the CLI's context, the usual sockets
    runtime: str | None = None  # of templates and creates that name none; None: the Engine's
    transport: str = "auto"
    disk_backing: str = "auto"
    pull: str = "missing"
    image: str = DEFAULT_IMAGE  # of templates that name none
    min_isolation: Isolation = Isolation.LANDLOCK  # what a create may not go below
    patience: float = 1.0  # how many times the usual time the Engine gets for an answer
    profiles_dir: Path | None = None  # seccomp profiles besides Capsule's own
    templates: tuple[Template, ...] = ()  # whose images `probe` looks for

    def __post_init__(self) -> None:
        for name, value, known in (
            ("docker_transport", self.transport, TRANSPORTS),
            ("docker_pull", self.pull, PULLS),
            ("disk_backing", self.disk_backing, DISK_BACKINGS),
        ):
            if value not in known:
                raise InvalidError(
                    f"unknown {name}: {value}", hint=f"use one of {', '.join(known)}", field=name
                )

    def image_of(self, template: Template) -> str:
        return template.image or self.image.replace("{template}", template.name)

    def is_ours(self, image: str) -> bool:
        """Whether `capsule template build` makes it: no registry has it."""
        return image.startswith("capsule/")
