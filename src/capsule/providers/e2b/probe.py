"""What the cloud can do for us, for `capsule doctor`."""

from __future__ import annotations

import asyncio

from capsule.errors import CapsuleError, NotSupportedError
from capsule.model import Isolation
from capsule.providers.contract import Capabilities, Finding
from capsule.providers.e2b import plan
from capsule.providers.e2b.cloud import OWNER, Cloud
from capsule.providers.e2b.errors import NO_KEY, UNREACHABLE
from capsule.providers.e2b.plan import Place
from capsule.providers.e2b.settings import E2bSettings

FEATURES = frozenset({"key", "pause", "snapshot"})
WITHIN = 10.0

_MACHINES = {62: "x86_64", 183: "aarch64"}  # in the header of a program, by the ELF standard


async def capabilities(
    cloud: Cloud | None, settings: E2bSettings, *, is_open: bool
) -> Capabilities:
    """One that is open is usable all the same: a key may come with a create, and a cloud that does
    not answer now may do so later. What a create meets then is its own error."""
    where = settings.api_url or settings.domain or "e2b.app"
    key, answer = await _findings(cloud, where)
    return Capabilities(
        provider="e2b",
        usable=is_open or (key.ok and answer.ok),
        isolation=Isolation.CLOUD,
        features=FEATURES,
        unenforced=tuple(plan.unenforced_anywhere()),
        findings=(key, answer, Finding("template", True, settings.template)),
    )


async def _findings(cloud: Cloud | None, where: str) -> tuple[Finding, Finding]:
    if cloud is None:
        unasked = Finding("cloud", False, f"{where} was not asked: no key", NO_KEY)
        return Finding("key", False, "none is configured", NO_KEY), unasked
    key = Finding("key", True, "from the configuration")
    try:
        async with asyncio.timeout(WITHIN):
            async for _ in cloud.list({OWNER: "nobody"}):
                break
    except CapsuleError as exc:
        return key, Finding("cloud", False, f"{where}: {exc.message}", exc.hint or UNREACHABLE)
    except TimeoutError:
        return key, Finding("cloud", False, f"{where}: no answer in {WITHIN:g} s", UNREACHABLE)
    return key, Finding("cloud", True, f"{where} answers")


def check_agent(agent: bytes, place: Place) -> None:
    """Raises NotSupportedError when the cloud's machines cannot run it."""
    built = _MACHINES.get(int.from_bytes(agent[18:20], "little"), "another machine")
    if built != place.machine:
        raise NotSupportedError(
            f"the cloud's machines are {place.machine}, and the agent is built for {built}",
            hint="let CAPSULE_AGENT name a capsule-agent for them",
        )
