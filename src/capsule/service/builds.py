"""Builds of templates that go on by themselves: whoever began one asks later how it goes.

What is known of a build is in memory: it ends with the server, as the build does.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import structlog

from capsule.errors import CapacityError, CapsuleError, ConflictError, InternalError, NotFoundError
from capsule.model import Template
from capsule.providers.images import Fetch, Log, Recipe, Step
from capsule.service.caller import Caller
from capsule.service.clock import Clock
from capsule.service.tasks import Tasks
from capsule.service.templates import Built, Templates
from capsule.service.tenant_templates import TenantTemplates

log = structlog.get_logger(__name__)

KEPT = 200  # builds
LINES = 5000  # of one
_LONGEST = 4096


class Line(NamedTuple):
    at: float
    text: str
    step: int  # which instruction it is of; 0: none yet


@dataclass(slots=True, eq=False)
class Build:
    id: str
    tenant: str
    state: str = "waiting"  # building, ready, error
    lines: list[Line] = field(default_factory=list)
    error: CapsuleError | None = None
    step: int = 0  # the one under way, or that failed
    rest: str = ""  # of a line that has no end yet


class Order(NamedTuple):
    """What is to be built: `context` opens it and may block, `done` names the result."""

    name: str
    context: Callable[[], BinaryIO]
    done: Callable[[Template], Awaitable[None]]
    cache: bool = True


class Builds:
    """Owns a task for each build that is under way."""

    def __init__(self, templates: Templates, clock: Clock) -> None:
        self._templates = TenantTemplates(templates)
        self._clock = clock
        self._known: OrderedDict[str, Build] = OrderedDict()
        self._tasks = Tasks()

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def announce(self, id: str, tenant: str) -> Build:
        """One that will be started. Raises CapacityError."""
        while len(self._known) >= KEPT:
            over = next((b for b in self._known.values() if b.state != "building"), None)
            if over is None:
                raise CapacityError(f"{KEPT} builds are under way", hint="wait for one to end")
            del self._known[over.id]
        made = self._known[id] = Build(id, tenant)
        return made

    def find(self, id: str, tenant: str) -> Build:
        """Raises NotFoundError."""
        found = self._known.get(id)
        if found is None or found.tenant != tenant:
            raise NotFoundError(f"build {id[:60]!r} does not exist", hint="begin another")
        return found

    def start(self, build: Build, caller: Caller, order: Order) -> None:
        """Raises ConflictError."""
        if build.state != "waiting":
            raise ConflictError(f"build {build.id} was started already", hint="begin another")
        build.state = "building"
        self._tasks.spawn(self._run(build, caller, order), f"build {order.name}")

    async def _run(self, build: Build, caller: Caller, order: Order) -> None:
        try:
            await self._build(build, caller, order)
        except CapsuleError as error:
            build.error = error
        except Exception as error:  # the root of a task: whoever asks must learn that it is over
            log.error("build failed unexpectedly", build=build.id, exc_info=error)
            build.error = InternalError("the build failed; the server's log has the cause")
        finally:
            self._say(build, "\n" if build.rest else "")
            build.state = "ready" if build.error is None else "error"

    async def _build(self, build: Build, caller: Caller, order: Order) -> None:
        context = await asyncio.to_thread(order.context)
        with context:
            recipe = Recipe(context, cache=order.cache)
            words = self._templates.build(caller, order.name, recipe)
            async with aclosing(words):
                async for said in words:
                    match said:
                        case Step():
                            build.step = said.number
                            self._say(build, f"{said.text}\n")
                        case Log():
                            self._say(build, said.text)
                        case Fetch():
                            pass
                        case Built():
                            build.step = 0
                            await order.done(said.template)

    def _say(self, build: Build, text: str) -> None:
        *lines, build.rest = (build.rest + text).split("\n")
        if len(build.rest) > _LONGEST:
            lines, build.rest = [*lines, build.rest], ""
        for line in lines:
            if line.strip() and len(build.lines) < LINES:
                build.lines.append(Line(self._clock.now(), line[:_LONGEST], build.step))
