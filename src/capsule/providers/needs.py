"""Which programs that a template needs a box does not have, asked of its agent."""

from __future__ import annotations

from collections.abc import Sequence

from capsule.errors import ForbiddenError, NotFoundError
from capsule.link.link import AgentLink
from capsule.model import SYSTEM_PATH, Template
from capsule.providers.contract import Box


async def missing_programs(box: Box, template: Template) -> list[str]:
    link = AgentLink(box.connect)
    places = template.env.get("PATH", SYSTEM_PATH).split(":")
    found = [name for name in template.needs if await _there(link, name, places)]
    return [name for name in template.needs if name not in found]


async def _there(link: AgentLink, name: str, places: Sequence[str]) -> bool:
    paths = [name] if name.startswith("/") else [f"{place}/{name}" for place in places if place]
    for path in paths:
        try:
            if (await link.stat(path, follow=True)).type == "file":
                return True
        except (NotFoundError, ForbiddenError):
            continue
    return False
