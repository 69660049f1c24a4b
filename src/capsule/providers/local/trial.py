"""What a trial sandbox has to do: keep a file, run a program, and end it."""

from __future__ import annotations

import asyncio
import secrets

from capsule.errors import NotFoundError, UnavailableError
from capsule.link.link import AgentLink
from capsule.model import ExecId, ExecRequest, Limits, SandboxId, SandboxSpec, Template
from capsule.providers.contract import Box

SPEC = SandboxSpec(Template("trial"), Limits())
PROGRAMS = (("/usr/bin/sleep", "30"), ("/bin/sleep", "30"))  # not for ever: it may not end
PATIENCE = 10.0


def new_id() -> SandboxId:
    return SandboxId(f"trial-{secrets.token_hex(4)}")


async def exercise(box: Box) -> None:
    """Raises CapsuleError where the box does not do what every sandbox has to."""
    link = AgentLink(box.connect)
    await link.write("/workspace/trial", b"trial")
    for argv in PROGRAMS:
        try:
            await _start_and_end(link, argv)
        except NotFoundError:  # this host has another one, or none
            continue
        return


async def _start_and_end(link: AgentLink, argv: tuple[str, ...]) -> None:
    request = ExecRequest(argv, ExecId("trial"), timeout=0.0)
    async with await link.exec(request) as stream:
        try:
            async with asyncio.timeout(PATIENCE):
                await link.kill(request.id)
                async for _ in stream:
                    pass
        except TimeoutError:
            raise UnavailableError("programs cannot be ended") from None
