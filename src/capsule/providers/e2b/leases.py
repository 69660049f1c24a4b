"""How long the cloud lets our sandboxes live: a while, and again and again a while more.

What ends a sandbox is the service, which knows when it is over. The cloud's own timeout is for the
case that this server is gone for good: then nobody asks for more, and nobody pays for what is left.

    Leases._run      owned by the Leases, ended by `aclose`; it alone extends
"""

from __future__ import annotations

import asyncio

import structlog

from capsule.errors import CapsuleError
from capsule.providers.e2b.cloud import Machine

log = structlog.get_logger(__name__)

PART = 3  # of its time a sandbox has at least two thirds left
AT_ONCE = 8  # requests under way


class Leases:
    def __init__(self, seconds: float) -> None:
        self._every = seconds / PART
        self._machines: dict[str, Machine] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def hold(self, machine: Machine) -> None:
        self._machines[machine.id] = machine

    def release(self, machine: Machine) -> None:
        self._machines.pop(machine.id, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            turns = asyncio.Semaphore(AT_ONCE)
            machines = list(self._machines.values())
            await asyncio.gather(*(self._extend(each, turns) for each in machines))

    async def _extend(self, machine: Machine, turns: asyncio.Semaphore) -> None:
        async with turns:
            if self._machines.get(machine.id) is not machine:
                return  # ended or paused meanwhile
            try:
                await machine.cloud.extend(machine.id)
            except CapsuleError as exc:  # if it is gone, the service's pulse finds out
                log.warning("time not extended", cloud=machine.id, reason=exc.message)
