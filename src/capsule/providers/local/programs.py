"""Whether the programs a template needs are there, on the host or in an image."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from capsule.errors import NotFoundError
from capsule.model import Template

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing_on_host(template: Template) -> list[str]:
    """A few microseconds: this is asked at every create."""
    places = _path(template).split(":")
    return [name for name in template.needs if not _on_host(name, places)]


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


def _on_host(name: str, places: Sequence[str]) -> bool:
    # Boxes see /usr, and /bin and /sbin in or beside it: a program in a home is not there.
    for place in places:
        try:
            os.lstat(os.path.join(place, name))
        except OSError:
            continue
        return place.startswith(("/usr/", "/bin", "/sbin"))
    return False
