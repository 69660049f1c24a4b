"""What each of the living sandboxes uses, for whoever watches the server. To be looked at is no
activity: nobody's idle time begins anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from capsule.errors import CapsuleError
from capsule.link.link import AgentLink
from capsule.model import SandboxId, State, Usage
from capsule.providers.contract import Measured
from capsule.service.entry import Entry

AT_ONCE = 16
WITHIN = 1.0  # for all of them: who does not answer by then is left out


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    sandbox: SandboxId
    template: str
    usage: Usage


async def usages(entries: Iterable[Entry], most: int) -> list[SandboxUsage]:
    """Of the `most` that were created first."""
    living = [e for e in entries if e.state is State.RUNNING and e.link is not None][:most]
    waiting, found = iter(living), []

    async def work() -> None:
        for entry in waiting:
            if entry.link is None:  # it has ended while the others were asked
                continue
            try:
                used = await usage_of(entry, entry.link)
            except (CapsuleError, OSError):
                continue
            found.append(SandboxUsage(entry.id, entry.template.name, used))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
            for _ in living[:AT_ONCE]:
                group.create_task(work())
    return found


async def usage_of(entry: Entry, link: AgentLink) -> Usage:
    inside = await link.usage()
    return await entry.box.measure(inside) if isinstance(entry.box, Measured) else inside


def by_tenant(entries: Iterable[Entry], most: int) -> Mapping[tuple[str, State], int]:
    """How many there are by tenant and state: of the `most` tenants that have the most, and of all
    others together under the name ""."""
    found = Counter((entry.tenant, entry.state) for entry in entries)
    sizes: Counter[str] = Counter()
    for (tenant, _), count in found.items():
        sizes[tenant] += count
    named = {tenant for tenant, _ in sizes.most_common(most)}
    told: Counter[tuple[str, State]] = Counter()
    for (tenant, state), count in found.items():
        told[tenant if tenant in named else "", state] += count
    return told
