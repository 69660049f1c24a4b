"""Sees to it that a template's image is there, and knows what must be seen to before it is used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from capsule.errors import NotFoundError
from capsule.providers.contract import Finding
from capsule.providers.docker.engine import Engine
from capsule.providers.docker.settings import DockerSettings

log = structlog.get_logger(__name__)

FRESH = 1.0  # seconds for which an image is not looked at again: a burst of creates looks once

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """An image that the Engine has."""

    name: str
    id: str
    volumes: tuple[str, ...]
    looked: float


class Supply:
    def __init__(self, engine: Engine, settings: DockerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._known: dict[str, Found] = {}
        self._pulls: dict[str, asyncio.Lock] = {}  # of one image, one pull at a time
        self.checked: set[tuple[str, tuple[str, ...]]] = set()  # (image id, needs) that were there

    async def get(self, name: str, *, template: str, progress: Progress | None = None) -> Found:
        """Pulled when it is missing and may be. Raises NotFoundError, UnavailableError."""
        known = self._known.get(name)
        if known is not None and time.monotonic() - known.looked < FRESH:
            return known
        about: Mapping[str, Any] | None = await self._engine.image(name)
        if about is None:
            self.forget(name)
            about = await self._pulled(name, template, progress or (lambda text: None))
        self._known[name] = found = _found(name, about)
        return found

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    async def findings(self) -> list[Finding]:
        """For `capsule doctor`: whose images are there."""
        found = []
        for template in self._settings.templates:
            name = self._settings.image_of(template)
            there = await self._engine.image(name) is not None
            fix = f"docker pull {name}"
            if self._settings.is_ours(name):
                fix = f"capsule template build {template.name}"
            detail = name if there else f"no image {name}"
            title = f"template {template.name}"
            found.append(Finding(title, there, detail, "" if there else fix))
        return found

    async def _pulled(self, name: str, template: str, progress: Progress) -> Mapping[str, Any]:
        self._may_pull(name, template)
        async with self._pulls.setdefault(name, asyncio.Lock()):
            about = await self._engine.image(name)  # whoever held the lock may have pulled it
            if about is None:
                await self._pull(name, progress)
                about = await self._engine.image(name)
        if about is None:
            raise NotFoundError(f"the image {name} was pulled, and is not there")
        return about

    def _may_pull(self, name: str, template: str) -> None:
        missing = f"the image {name} of template {template} does not exist"
        if self._settings.is_ours(name):
            raise NotFoundError(missing, hint=f"build it: capsule template build {template}")
        if self._settings.pull == "never":
            raise NotFoundError(
                f"{missing}, and pulls are off",
                hint=f"docker pull {name}, or set CAPSULE_DOCKER_PULL=missing",
            )

    async def _pull(self, name: str, progress: Progress) -> None:
        log.info("pulling an image", image=name)
        progress(f"pulling {name}")
        layers: dict[str, tuple[int, int]] = {}
        async for step in self._engine.pull(name):
            progress(_said(name, step, layers))
        log.info("pulled an image", image=name)


def _found(name: str, about: Mapping[str, Any]) -> Found:
    config = about.get("Config") or {}
    volumes = tuple(sorted(str(path) for path in config.get("Volumes") or ()))
    return Found(name, str(about.get("Id")), volumes, time.monotonic())


def _said(name: str, step: Mapping[str, Any], layers: dict[str, tuple[int, int]]) -> str:
    detail = step.get("progressDetail") or {}
    if detail.get("total") and step.get("status") == "Downloading":
        layers[str(step.get("id"))] = int(detail.get("current") or 0), int(detail["total"])
    if layers:
        done, total = (sum(part) for part in zip(*layers.values(), strict=True))
        return f"pulling {name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
    return f"pulling {name}: {step.get('status', '')}"
