"""Which providers there are. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import cast

from capsule.config import Config
from capsule.errors import InvalidError, NotFoundError, NotSupportedError
from capsule.model import Template
from capsule.providers.contract import Provider

Factory = Callable[[Config, Mapping[str, Template]], Provider]

GROUP = "capsule.providers"  # third parties announce a Factory under this entry point

BUILT_IN: Mapping[str, str] = {
    "local": "capsule.providers.local.build:build",
    "docker": "capsule.providers.docker.build:build",
}


def names() -> tuple[str, ...]:
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))}))


def make_provider(
    name: str, config: Config, templates: Mapping[str, Template] | None = None
) -> Provider:
    """A provider that is not open yet. Raises NotFoundError for a name nobody knows."""
    return _find(name)(config, templates or {})


async def open_provider(
    name: str, config: Config, templates: Mapping[str, Template] | None = None
) -> Provider:
    provider = make_provider(name, config, templates)
    try:
        await provider.open()
    except BaseException:
        await provider.aclose()
        raise
    return provider


def _find(name: str) -> Factory:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        try:
            return cast(Factory, getattr(importlib.import_module(module), attribute))
        except ModuleNotFoundError as exc:
            raise NotSupportedError(
                f"provider {name} needs a package that is not installed: {exc.name}",
                hint=f"pip install 'capsule-sandbox[{name}]'",
            ) from exc
    for point in entry_points(group=GROUP, name=name):
        try:
            return cast(Factory, point.load())
        except ImportError as exc:
            raise InvalidError(
                f"provider {name} cannot be imported: {exc}", hint="install the extra it belongs to"
            ) from exc
    raise NotFoundError(f"no such provider: {name}", hint=f"there are {', '.join(names())}")
