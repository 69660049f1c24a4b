"""Which provider the tests of state (snapshots, steps, volumes) run over: the local one, or another
that the test's folder was registered with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from capsule.catalog import load_catalog
from capsule.config import Config
from capsule.model import Isolation, Template
from capsule.providers.contract import Provider
from capsule.providers.registry import make_provider

CATALOG = load_catalog(None)
LEVEL = Isolation.NAMESPACES  # where paths are as they seem, and disks have a size


def _local(config: Config) -> Provider:
    return make_provider("local", config, CATALOG)


def _local_boxes(folder: Path) -> list[str]:
    return os.listdir(folder / "r" / "boxes")


@dataclass(frozen=True)
class Backend:
    name: str = "local"
    make: Callable[[Config], Provider] = _local
    catalog: Mapping[str, Template] = field(default_factory=lambda: CATALOG)
    level: Isolation | None = LEVEL
    layers: str = "layers"  # where they are, below the data directory
    boxes: Callable[[Path], list[str]] = _local_boxes
    volumes: Callable[[Path], list[str]] = lambda folder: os.listdir(folder / "d" / "volumes")
    sized: bool = os.geteuid() == 0  # whether volumes are held to a size
    copies: bool = False  # what a box begins from is copied: it tells all that it has


LOCAL = Backend()
_REGISTERED: dict[Path, Backend] = {}


def register(folder: Path, backend: Backend) -> None:
    _REGISTERED[folder] = backend


def of(folder: Path) -> Backend:
    """Also of a folder below one that was registered."""
    found = (_REGISTERED[each] for each in (folder, *folder.parents) if each in _REGISTERED)
    return next(found, LOCAL)


def layers(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "d" / of(folder).layers))
