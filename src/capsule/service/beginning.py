"""What a template runs in each new sandbox, before anybody can use it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from capsule.errors import UnavailableError
from capsule.link.collect import Collected
from capsule.link.link import AgentLink
from capsule.model import MIB, ExecId, ExecRequest, Reason
from capsule.service.entry import Entry

START = ExecId("start")  # what it is found by among the execs
BUDGET = 30.0  # seconds for each
_PAUSE = 0.2
_TOLD = 500  # characters of what a failed one has printed


async def begin(entry: Entry) -> None:
    """Raises UnavailableError: then it is no sandbox of this template."""
    template, link = entry.template, entry.link
    assert link is not None  # it has a box
    if template.prepare and not entry.layers:
        ended = await _run(link, entry, template.prepare, "prepare")
        if not _well(ended):
            raise _failure(entry, "prepare", ended)
    if template.start:
        request = replace(_request(entry, template.start, START), timeout=0.0, keep="tail")
        async with await link.exec(request):
            pass  # it goes on without us
    if template.ready:
        await _await_ready(link, entry)


async def _await_ready(link: AgentLink, entry: Entry) -> None:
    loop = asyncio.get_running_loop()
    deadline, count = loop.time() + BUDGET, 0
    while True:
        count += 1
        ended = await _run(link, entry, entry.template.ready, f"ready-{count}")
        if _well(ended):
            return
        if loop.time() + _PAUSE > deadline:
            raise _failure(entry, "ready", ended)
        await asyncio.sleep(_PAUSE)


async def _run(link: AgentLink, entry: Entry, command: str, id: str) -> Collected:
    return await link.collect(_request(entry, command, ExecId(id)))


def _request(entry: Entry, command: str, id: ExecId) -> ExecRequest:
    return ExecRequest(
        argv=("/bin/sh", "-c", command),
        id=id,
        env=entry.environ,
        cwd=entry.template.user.home,
        timeout=BUDGET,
        output_limit=MIB,
    )


def _well(ended: Collected) -> bool:
    return ended.exit.reason is Reason.EXITED and ended.exit.exit_code == 0


def _failure(entry: Entry, what: str, ended: Collected) -> UnavailableError:
    said = (ended.stderr or ended.stdout)[-_TOLD:].decode("utf-8", "replace").strip()
    told = f": {said}" if said else ""
    return UnavailableError(
        f"`{what}` of template {entry.template.name} did not succeed within {BUDGET:g} seconds, "
        f"it ended with {ended.exit.exit_code}{told}",
        hint="mend the template, and build it again",
    )
