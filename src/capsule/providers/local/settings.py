"""What the local provider is told. No setting is read from anywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capsule.errors import InvalidError
from capsule.model import Isolation, Template

DISK_BACKINGS = ("auto", "loop", "memory")


@dataclass(frozen=True, slots=True)
class LocalSettings:
    data_dir: Path  # skeletons, disk images, images: survives a reboot
    run_dir: Path  # sockets and the boxes' records: short paths, gone after a reboot
    agent: Path
    isolation: Isolation | None = None  # force a level; None: the strongest the kernel grants
    disk_backing: str = "auto"
    cgroup_scope: str = "auto"
    profiles_dir: Path | None = None  # seccomp profiles besides Capsule's own
    templates: tuple[Template, ...] = ()  # whose needs `probe` looks for

    def __post_init__(self) -> None:
        if self.disk_backing not in DISK_BACKINGS:
            raise InvalidError(
                f"unknown disk backing: {self.disk_backing}",
                hint=f"use one of {', '.join(DISK_BACKINGS)}",
                field="disk_backing",
            )
        if self.isolation is Isolation.NONE:
            raise InvalidError(
                "isolation cannot be switched off: none",
                hint="use namespaces or landlock, or leave it out",
                field="isolation",
            )
