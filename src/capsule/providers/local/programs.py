"""Whether the programs a template needs are there, on the host or in an image."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from capsule.errors import NotFoundError
from capsule.model import SYSTEM_PATH, Template
from capsule.providers.local.skeleton import SYSTEM_DIRS

VISIBLE = tuple(f"/{name}/" for name in ("usr", *SYSTEM_DIRS))  # of the host, to its boxes


def missing_on_host(template: Template, visible: tuple[str, ...] = VISIBLE) -> list[str]:
    """About 15 microseconds for each: this is asked once a second at most, on the event loop."""
    places = [f"{place}/" for place in _path(template).split(":")]
    places = [place for place in places if place.startswith(visible)]
    return [name for name in template.needs if not _on_host(name, places, visible)]


def missing_in_layers(template: Template, layers: Sequence[Path]) -> list[str]:
    """Blocks."""
    from capsule.providers.local import images  # costs 12 ms; most templates use none

    found = images.find_programs(layers, template.needs, _path(template))
    return [name for name in template.needs if name not in found]


def require(template: Template, missing: Sequence[str], where: str) -> None:
    """Raises NotFoundError, with what to do, if anything is missing."""
    if missing:
        names = ", ".join(missing)
        raise NotFoundError(
            f"template {template.name} needs {names}, which is not installed {where}",
            hint=f"install {names} below /usr, or use another template",
            template=template.name,
            missing=list(missing),
        )


def _path(template: Template) -> str:
    return template.env.get("PATH") or SYSTEM_PATH


def _on_host(name: str, places: Sequence[str], visible: tuple[str, ...]) -> bool:
    """A link into somebody's home is there for the host alone, and one to nowhere for nobody."""
    for place in places:
        try:
            at = os.path.realpath(place + name, strict=True)
            mode = os.lstat(at).st_mode
        except OSError:
            continue
        if at.startswith(visible) and stat.S_ISREG(mode) and mode & 0o111:
            return True
    return False
