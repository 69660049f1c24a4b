"""Which providers there are. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, cast

from capsule.config import Config
from capsule.errors import InvalidError, NotFoundError, NotSupportedError
from capsule.model import Template
from capsule.providers.contract import Provider
from capsule.providers.images import Images

Factory = Callable[[Config, Mapping[str, Template]], Provider]

GROUP = "capsule.providers"  # third parties announce a Factory under this entry point

BUILT_IN: Mapping[str, str] = {
    "local": "capsule.providers.local.build:build",
    "docker": "capsule.providers.docker.build:build",
    "e2b": "capsule.providers.e2b.build:build",
}

# Providers whose sandboxes start from images, and what has to do with those.
IMAGES: Mapping[str, str] = {
    "local": "capsule.providers.local.template_images:build",
    "docker": "capsule.providers.docker.images:build",
}
BUILDER = "docker"  # the one of them that makes images from Dockerfiles


def names() -> tuple[str, ...]:
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))}))


def make_provider(
    name: str, config: Config, templates: Mapping[str, Template] | None = None
) -> Provider:
    """A provider that is not open yet. Raises NotFoundError for a name nobody knows."""
    return _find(name)(config, templates or {})


def make_images(name: str, config: Config) -> Images:
    """Raises NotFoundError for a provider without images, NotSupportedError where its package is
    not installed. It connects to nothing before it is used."""
    if name not in IMAGES:
        raise NotFoundError(f"provider {name} has no images", hint=f"there are {', '.join(IMAGES)}")
    return cast(Images, _load(name, IMAGES[name])(config))


def _load(name: str, where: str) -> Any:
    module, _, attribute = where.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as exc:
        raise NotSupportedError(
            f"provider {name} needs a package that is not installed: {exc.name}",
            hint=f"`make setup` in a clone, or install Capsule's wheel with its extra `{name}`",
        ) from exc


def _find(name: str) -> Factory:
    if name in BUILT_IN:
        return cast(Factory, _load(name, BUILT_IN[name]))
    for point in entry_points(group=GROUP, name=name):
        try:
            return cast(Factory, point.load())
        except ImportError as exc:
            raise InvalidError(
                f"provider {name} cannot be imported: {exc}", hint="install the extra it belongs to"
            ) from exc
    raise NotFoundError(f"no such provider: {name}", hint=f"there are {', '.join(names())}")
